"""An in-memory emulation of Google Cloud Storage on the loopback, for tests of gs:// paths.

    python tests/gcs_emulator.py PORT BUCKET

PORT 0 takes any free port; the first line printed is the address.  The package gcp-storage-emulator
implements most of the JSON API.  This file adds what gcsfs (for files) and tensorstore (for the
arrays of checkpoints) need beyond that: preconditions on generations, ranges counted from the end,
listings between two names, moves, many parallel requests, and faults at random.
"""

import json
import logging
import random
import re
import sys
import threading
import time
from functools import partial, partialmethod
from http import HTTPStatus
from http.server import ThreadingHTTPServer

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets, objects
from gcp_storage_emulator.storage import Storage

ONE_AT_A_TIME = threading.RLock()


class LoopbackServer(ThreadingHTTPServer):
    """Serves each connection in a thread of its own, because reading a checkpoint opens hundreds.

    With the default backlog of 5 most of them would be refused and retried a second later.
    """

    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Report errors, except clients that close the connection, which gcsfs often does."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


# ---- faults


class Faults:
    """What goes wrong with a request, at random: each kind has a probability in `chances`.

    unavailable (503), too_many (429); slow: up to 3 s late; cut: 30 bytes of the answer's body,
    then the connection is closed; lost: carried out, but the connection is closed without an
    answer, so that a client that repeats a write on condition of a generation meets 412.
    stale: seconds for which listings do not have a new object.
    read_only: 403 to every request but GET.
    """

    KINDS = ("unavailable", "too_many", "slow", "cut", "lost")

    def __init__(self):
        self.set()

    def set(self, seed: int = 0, stale: float = 0, read_only: bool = False, **chances):
        assert set(chances) <= set(self.KINDS)
        self.random, self.chances = random.Random(seed), chances
        self.stale, self.read_only = stale, read_only

    def draw(self) -> str:
        x = self.random.random()
        for kind, chance in self.chances.items():
            if (x := x - chance) < 0:
                return kind
        return ""


FAULTS = Faults()


class Writer:
    """Passes on an answer's headers and the first `limit` bytes of its body; with limit=-1
    nothing."""

    def __init__(self, file, limit: int):
        self.file, self.limit, self.is_body = file, limit, False

    def write(self, data: bytes):
        if self.limit >= 0:
            self.file.write(data[: self.limit] if self.is_body else data)
        self.is_body = True

    def __getattr__(self, name):
        return getattr(self.file, name)


class Handler(server.RequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections, as Google does
    disable_nagle_algorithm = True  # a body would wait 40 ms for the client to confirm the headers

    def answer(self, method: str):
        is_spared = self.headers.get("x-spared")
        fault = "" if is_spared else FAULTS.draw()
        status = dict(unavailable=503, too_many=429).get(fault)
        if FAULTS.read_only and method != server.GET and not is_spared:
            status = 403
        if status:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "slow":
            time.sleep(FAULTS.random.uniform(0, 3))
        if fault in ("cut", "lost"):
            self.close_connection = True
            self.wfile = Writer(self.wfile, 30 if fault == "cut" else -1)
        server.Router(self).handle(method)

    do_GET = partialmethod(answer, server.GET)
    do_POST = partialmethod(answer, server.POST)
    do_DELETE = partialmethod(answer, server.DELETE)
    do_PUT = partialmethod(answer, server.PUT)
    do_PATCH = partialmethod(answer, server.PATCH)


def set_faults(request, response, storage):
    """POST sets the faults from now on."""
    FAULTS.set(**json.loads(request.data))


# ---- preconditions


def query_value(request, name: str) -> str | None:
    return request.query.get(name, [None])[0]


def object_name(request) -> str | None:
    """The object that a request reads or changes; None for requests on no single object."""
    body = request.data if isinstance(request.data, dict) else {}
    uploaded = query_value(request, "name") or body.get("meta", body).get("name")
    return request.params.get("dest_object_id") or request.params.get("object_id") or uploaded


def object_generation(storage, bucket: str, name: str) -> str:
    """The version of an object; "0" if there is none, as in GCS."""
    try:
        return storage.get_file_obj(bucket, name)["generation"]
    except NotFound:
        return "0"


def failed_precondition(request, storage, name: str | None) -> HTTPStatus | None:
    """The status that answers a request whose precondition does not hold; None if it holds.

    Tensorstore overwrites the index of its arrays only if nothing has changed it since it was read.
    """
    must_be = query_value(request, "ifGenerationMatch")
    must_not_be = query_value(request, "ifGenerationNotMatch")
    if name is None or must_be is must_not_be is None:
        return None
    generation = object_generation(storage, request.params["bucket_name"], name)
    if must_be not in (None, generation):
        return HTTPStatus.PRECONDITION_FAILED
    if must_not_be == generation:
        is_get = request.method == "GET"
        return HTTPStatus.NOT_MODIFIED if is_get else HTTPStatus.PRECONDITION_FAILED
    return None


def check_preconditions(handler):
    """A handler that checks a request's preconditions first, and runs one request at a time."""

    def handle(request, response, storage):
        name = object_name(request)  # waits for the request's body, so it is outside of the lock
        with ONE_AT_A_TIME:
            status = failed_precondition(request, storage, name)
            if status is None:
                handler(request, response, storage)
            else:
                response.status = status

    return handle


# ---- requests that the package implements in part or not at all


def byte_range(header: str, size: int) -> range | None:
    """Which of `size` bytes `bytes=2-5`, `bytes=2-`, or `bytes=-4`, the last four, asks for."""
    found = re.fullmatch(r"\s*bytes=(\d*)-(\d*)\s*", header)
    if not found or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        return range(max(0, size - int(last)), size)
    return range(int(first), min(size, int(last) + 1) if last else size)


def download(request, response, storage):
    """Send an object or a range of its bytes, with its generation, which tensorstore needs."""
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
    elif not part:
        response.status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        return
    else:
        response.status = HTTPStatus.PARTIAL_CONTENT
        response["content-range"] = f"bytes {part[0]}-{part[-1]}/{len(data)}"
        data = data[part.start : part.stop]
    response.write_file(data, about["contentType"])


def get(request, response, storage):
    """Send an object's bytes or its metadata, as the query asks."""
    answer = download if query_value(request, "alt") == "media" else objects.get
    answer(request, response, storage)


def list_objects(request, response, storage):
    """List the objects from startOffset up to endOffset, all on one page.

    Tensorstore lists and deletes such ranges; without them it would delete other objects too.
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
    if FAULTS.stale and not request.get_header("x-spared"):
        latest = time.time_ns() - FAULTS.stale * 10**9
        found = [about for about in found if int(about["generation"]) < latest]
    response.json({"kind": "storage#objects", "items": found, "prefixes": folders})


def move(request, response, storage):
    """Rename an object within its bucket, as gcsfs does."""
    bucket = request.params["dest_bucket_name"] = request.params["bucket_name"]
    objects.copy(request, response, storage)
    if response.status == HTTPStatus.OK:
        storage.delete_file(bucket, request.params["object_id"])


COMPLETE = {}
"""{id of a resumable upload: what was answered when it was complete}"""


UPLOAD_PART = objects.upload_partial


def upload_part(request, response, storage):
    """Take a part of an upload; to one that is complete, repeat the answer, as Google does for a
    client that did not get it."""
    name = query_value(request, "upload_id")
    if name not in COMPLETE:
        UPLOAD_PART(request, response, storage)
        if response.status != HTTPStatus.OK:
            return
        COMPLETE[name] = json.loads(response._content)
    response.json(COMPLETE[name])


# ---- the server


def routes() -> tuple:
    """The package's table of (path, {method: handler}), with the handlers of this file."""
    objects.upload_partial = upload_part  # insert calls it by this name
    replacements = {
        UPLOAD_PART: upload_part,
        objects.download: download,
        objects.get: get,
        objects.ls: list_objects,
    }
    object_path = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>[^/]+)"
    move_route = (object_path + r"/moveTo/o/(?P<dest_object_id>[^/]+)$", {"POST": move})
    faults_route = (r"^/faults$", {"POST": set_faults})
    table = []
    for path, handlers in (move_route, faults_route, *server.HANDLERS):
        handlers = {method: replacements.get(f, f) for method, f in handlers.items()}
        table.append((path, {method: check_preconditions(f) for method, f in handlers.items()}))
    return tuple(table)


def serve(port: int, bucket: str):
    """Serve an empty bucket until the process is killed."""
    logging.disable()  # a missing object is no error; errors in a handler are printed all the same
    server.HANDLERS = routes()
    storage = Storage(use_memory_fs=True)
    buckets.create_bucket(bucket, storage)
    listener = LoopbackServer(("127.0.0.1", port), partial(Handler, storage))
    print(f"http://127.0.0.1:{listener.server_port}", flush=True)
    listener.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
