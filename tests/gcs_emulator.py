"""Google Cloud Storage emulated on the loopback, in memory, for tests of gs:// paths.

    python tests/gcs_emulator.py PORT BUCKET

PORT 0 takes any free one; the first line printed is the address.  The package gcp-storage-emulator
answers most of the JSON API.  This file adds what gcsfs (files) and tensorstore (the arrays of
checkpoints) rely on beyond that: preconditions on generations, ranges counted from the end,
listings between two names, moves, and many requests at once.
"""

import logging
import re
import sys
import threading
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets, objects
from gcp_storage_emulator.storage import Storage

ONE_AT_A_TIME = threading.RLock()


class LoopbackServer(ThreadingHTTPServer):
    """A thread for each request: checkpoints are read in hundreds of parallel ones.

    With the default backlog of 5 most would be turned away, and try again a second later.
    """

    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Report what goes wrong, but not clients that hang up: gcsfs often does."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


# ---- preconditions


def query_value(request, name: str) -> str | None:
    return request.query.get(name, [None])[0]


def object_name(request) -> str | None:
    """The object that a request reads or changes; None where it is not about one object."""
    body = request.data if isinstance(request.data, dict) else {}
    uploaded = query_value(request, "name") or body.get("meta", body).get("name")
    return request.params.get("dest_object_id") or request.params.get("object_id") or uploaded


def generation(storage, bucket: str, name: str) -> str:
    """The version of an object, and "0" where there is none: GCS says so too."""
    try:
        return storage.get_file_obj(bucket, name)["generation"]
    except NotFound:
        return "0"


def refusal(request, storage, name: str | None) -> HTTPStatus | None:
    """The status of a request whose precondition does not hold.

    Tensorstore writes the index of its arrays only if it is still the one that it has read.
    """
    must_be = query_value(request, "ifGenerationMatch")
    must_not_be = query_value(request, "ifGenerationNotMatch")
    if name is None or must_be is must_not_be is None:
        return None
    now = generation(storage, request.params["bucket_name"], name)
    if must_be not in (None, now):
        return HTTPStatus.PRECONDITION_FAILED
    if must_not_be == now:
        known = HTTPStatus.NOT_MODIFIED
        return known if request.method == "GET" else HTTPStatus.PRECONDITION_FAILED
    return None


def guarded(handler):
    """The handler, for requests whose precondition holds, and with no other at work meanwhile."""

    def serve(request, response, storage):
        name = object_name(request)  # this waits for the body, so it comes before the lock
        with ONE_AT_A_TIME:
            refused = refusal(request, storage, name)
            if refused:
                response.status = refused
            else:
                handler(request, response, storage)

    return serve


# ---- requests that the package answers in part or not at all


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """(first, last + 1) of `bytes=2-5`, `bytes=2-`, or `bytes=-4`, which is the last four."""
    found = re.fullmatch(r"\s*bytes=(\d*)-(\d*)\s*", header)
    if not found or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


def download(request, response, storage):
    """An object or a range of its bytes, with its generation, which tensorstore has to see."""
    bucket, name = request.params["bucket_name"], request.params["object_id"]
    try:
        data, about = storage.get_file(bucket, name), storage.get_file_obj(bucket, name)
    except NotFound:
        response.status = HTTPStatus.NOT_FOUND
        return
    response["x-goog-generation"] = about["generation"]
    response["x-goog-metageneration"] = about["metageneration"]
    part = byte_range(request.get_header("range", ""), len(data))
    if part is None:
        response["x-goog-hash"] = f"crc32c={about['crc32c']},md5={about['md5Hash']}"
        response.write_file(data, about["contentType"])
        return
    first, end = part
    if first >= end:
        response.status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        return
    response.status = HTTPStatus.PARTIAL_CONTENT
    response["content-range"] = f"bytes {first}-{end - 1}/{len(data)}"
    response.write_file(data[first:end], about["contentType"])


def get(request, response, storage):
    """An object's bytes, or what is known about it, as the query asks."""
    answer = download if query_value(request, "alt") == "media" else objects.get
    answer(request, response, storage)


def list_objects(request, response, storage):
    """The objects from startOffset up to endOffset, all on one page.

    Tensorstore lists, and deletes, by such ranges: without them it would meet its neighbours too.
    """
    start = query_value(request, "startOffset") or ""
    end = query_value(request, "endOffset") or chr(sys.maxunicode)
    prefix, delimiter = query_value(request, "prefix"), query_value(request, "delimiter")
    try:
        found, folders = storage.get_file_list(request.params["bucket_name"], prefix, delimiter)
    except NotFound:
        response.status = HTTPStatus.NOT_FOUND
        return
    found = [about for about in found if start <= about["name"] < end]
    response.json({"kind": "storage#objects", "items": found, "prefixes": folders})


def move(request, response, storage):
    """Give an object another name in its bucket; gcsfs renames with it."""
    bucket = request.params["dest_bucket_name"] = request.params["bucket_name"]
    objects.copy(request, response, storage)
    if response.status == HTTPStatus.OK:
        storage.delete_file(bucket, request.params["object_id"])


# ---- the server


def routes() -> tuple:
    """The package's (path, {method: handler}) with our handlers in it, and all of them guarded."""
    ours = {objects.download: download, objects.get: get, objects.ls: list_objects}
    an_object = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>[^/]+)"
    moves = (an_object + r"/moveTo/o/(?P<dest_object_id>[^/]+)$", {"POST": move})
    table = []
    for path, methods in (moves, *server.HANDLERS):
        handlers = {method: guarded(ours.get(f, f)) for method, f in methods.items()}
        table.append((path, handlers))
    return tuple(table)


def serve(port: int, bucket: str):
    """Serve an empty bucket until the process is ended."""
    logging.disable()  # a missing object is an answer; errors in a handler are printed regardless
    server.HANDLERS = routes()
    storage = Storage(use_memory_fs=True)
    buckets.create_bucket(bucket, storage)
    listener = LoopbackServer(("127.0.0.1", port), partial(server.RequestHandler, storage))
    print(f"http://127.0.0.1:{listener.server_port}", flush=True)
    listener.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
