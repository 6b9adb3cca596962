"""One server with the sample model for all tests of this folder, on free ports of this machine."""

import os
import pathlib
import re
import subprocess
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "drafthorse"
READY_SECONDS = 60


class Server:
    """A running `drafthorse serve`; its ports are what it said they are."""

    def __init__(self, *flags, repository=ROOT / "model_repository"):
        command = [BINARY, "serve", "--model-repository", repository]
        command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--log-format=json", *flags]
        self.process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        self.ports, self.log = {}, []
        self.listening, self.ready = threading.Event(), threading.Event()
        threading.Thread(target=self._read_log, daemon=True).start()
        if not self.listening.wait(READY_SECONDS):
            self.stop()
            raise RuntimeError("the server did not say where it listens:\n" + "".join(self.log))

    def _read_log(self):
        for line in self.process.stderr:
            self.log.append(line)
            for name in ("http", "grpc", "metrics"):
                found = re.search(rf'"{name}":"[^"]*:(\d+)"', line)
                if found:
                    self.ports[name] = int(found[1])
            if len(self.ports) == 3:
                self.listening.set()

    def address(self, name):
        return f"127.0.0.1:{self.ports[name]}"

    def wait_until_ready(self, is_ready):
        deadline = time.monotonic() + READY_SECONDS
        while not is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("the server did not become ready:\n" + "".join(self.log))
            time.sleep(0.05)

    def stop(self):
        """Ends the server as a pod is ended; its exit status."""
        self.process.terminate()
        return self.process.wait(40)


_server = None


def shared():
    """The server of this run, started at the first call."""
    global _server
    if _server is None:
        import atexit

        import tritonclient.grpc as triton

        _server = Server()
        atexit.register(_server.stop)
        client = triton.InferenceServerClient(_server.address("grpc"))
        _server.wait_until_ready(lambda: client.is_model_ready("llm"))
    return _server
