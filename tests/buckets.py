"""An emulated bucket, in a process of its own."""

import json
import subprocess
import sys
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import quote, urlencode

from conftest import ROOT

OBJECTS = "/storage/v1/b/bucket/o"


def object_path(name: str) -> str:
    return f"{OBJECTS}/{quote(name, safe='')}"


class Bucket:
    """The bucket, read and written by plain HTTP, without the libraries under test.

    emulator: its process.  env: the environment in which a process uses it instead of Google's.
    """

    def __init__(self, emulator: subprocess.Popen, address: str, env: dict):
        self.emulator, self.host = emulator, address.removeprefix("http://")
        self.env = env | {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "NO_PROXY": "127.0.0.1",
            "JAX_PLATFORMS": "cpu",
        }

    def call(self, method: str, path: str, *, code=200, body=None, headers=None, **query):
        """The answer's body and headers; fails unless its status is `code`."""
        connection = HTTPConnection(self.host, timeout=30)
        headers = {"x-spared": "yes"} | (headers or {})  # the tests' own requests never fail
        connection.request(method, f"{path}?{urlencode(query)}", body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        assert answer.status == code, f"{method} {path} {query}: {answer.status}"
        return data, answer.headers

    def names(self, prefix: str, **query) -> set[str]:
        """The names of all objects with this prefix, without the prefix."""
        listing = json.loads(self.call("GET", OBJECTS, prefix=prefix, **query)[0])
        return {about["name"].removeprefix(prefix) for about in listing["items"]}

    def has(self, name: str) -> bool:
        return "" in self.names(name)

    def read(self, name: str, **options) -> bytes:
        return self.call("GET", object_path(name), alt="media", **options)[0]

    def write(self, name: str, data: bytes, **options):
        self.call("POST", "/upload" + OBJECTS, body=data, uploadType="media", name=name, **options)

    def contents(self, prefix: str) -> dict[str, bytes]:
        return {name: self.read(prefix + name) for name in self.names(prefix)}

    def copy(self, prefix: str, to: str):
        for name, data in self.contents(prefix).items():
            self.write(to + name, data)

    def set_faults(self, **faults):
        """What is to go wrong from now on with requests of others: see gcs_emulator.Faults."""
        self.call("POST", "/faults", body=json.dumps(faults))


@contextmanager
def emulate_bucket(env: dict):
    """An empty Bucket while the block runs."""
    command = [sys.executable, str(ROOT / "tests" / "gcs_emulator.py"), "0", "bucket"]
    emulator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = emulator.stdout.readline().strip()
        assert address, "the emulator did not start"
        yield Bucket(emulator, address, env)
    finally:
        emulator.terminate()
        emulator.communicate()
