"""The zygote, a process that forks the processes of programs: ``python -s -P -B -m sandbox.fork_server``.

It imports the modules that programs may use, takes its walls and proves them; from then on it only forks,
reaps and reports. It never sees a program: source goes from the engine straight to the child. Control
messages are JSON datagrams on a SEQPACKET socket; the child's channel and the child's pidfd travel along.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from sandbox import canary, confine, contract, determinism, kernel, runner
from sandbox.preload import preload

_real_getpid = os.getpid
_MAX_REQUEST = 4096


class Zygote:
    """The state of this process.

    ``config`` holds ``index``, ``pool``, ``memory``, ``cpu``, ``nice``, ``preload`` and ``slots``.
    """

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control, self.config = control, config
        self.walls = confine.Walls()
        self.limits = confine.ChildLimits(config["memory"], config["cpu"], config["nice"])
        self.children: dict[int, tuple[int, int]] = {}
        self.free: list[int] = []
        self.pid = 0
        self.importable = (*contract.STDLIB, *config["preload"])

    def start(self) -> None:
        """Import, take the walls, prove them, and report that programs can be forked."""
        preload(self.config["preload"])
        # before the first fork, after which the other threads could not be seen
        refuse_unfit()
        os.environ["TZ"] = "UTC"
        time.tzset()
        confine.enter_user_namespace(self.walls)
        confine.choose_uids(self.walls, self.config["index"], self.config["pool"])
        slots = self.config["slots"]
        if self.walls.uid_mode == "own":
            # slot 0 is the canary's
            slots = min(slots, self.walls.uid_count - 1)
        self.free = list(range(slots, 0, -1))
        confine.prefer_as_victim(self.walls)
        confine.enter_namespaces(self.walls)
        self._enter_pid_namespace()
        self.pid = _real_getpid()
        self.limits.address_space = kernel.address_space()
        confine.close_root(self.walls)
        confine.prepare_filters(self.walls)
        confine.trim_privileges(self.walls)
        _forget_files()
        determinism.patch()
        gc.collect()
        # a child that collects garbage must not copy our pages
        gc.freeze()
        # with a handle of this process: the engine kills it, and the outer process sees the end of all
        handle = os.pidfd_open(self.pid)
        self.send({"op": "ready", **self._report()}, handle)
        os.close(handle)

    def _enter_pid_namespace(self) -> None:
        """Become pid 1 of a new pid namespace; the outer process only waits and passes on our exit code."""
        if not self.walls.attempt("pid_ns", lambda: kernel.unshare(kernel.CLONE_NEWPID)):
            return
        inner = os.fork()
        if inner:
            self.control.close()
            code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
            os._exit(code if code >= 0 else 128 - code)
        # where the outer process is gone already, the engine sees that and hangs up
        kernel.die_with_parent(signal.SIGKILL)

    def _report(self) -> dict[str, Any]:
        return {
            "walls": self.walls.state,
            "uid_mode": self.walls.uid_mode,
            "kernel": " ".join(os.uname()[::2]),
            "canary": self._canary(filtered=True),
            "bare": self._canary(filtered=False),
        }

    def _canary(self, *, filtered: bool) -> dict[str, str]:
        """Fork a child that tries forbidden things, and return the outcomes; the engine bounds the time."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _reset_signals()
            self._sing(theirs, filtered)
        theirs.close()
        with ours:
            text = b"".join(iter(lambda: ours.recv(65536), b""))
        results: dict[str, str] = json.loads(text) if text else {}
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        results["trace"] = "killed" if ended == -signal.SIGSYS else f"open:{ended}"
        return results

    def _sing(self, channel: socket.socket, filtered: bool) -> NoReturn:
        code = confine.UNCONFINED
        try:
            confine.confine(self.walls, self.limits, channel.fileno(), 0, self.pid, filtered=filtered)
            budget = self.limits.address_space + self.limits.memory
            os.write(3, json.dumps(canary.run(self.pid, budget)).encode())
            canary.trace()
            code = 0
        finally:
            # a child never goes on with the zygote's work
            os._exit(code)

    def serve(self) -> None:
        """Fork and reap until the engine closes the control socket; then kill all children."""
        woken, waker = socket.socketpair()
        for end in (woken, waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if woken.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
            self._reap()
            if self.control.fileno() in ready and not self._request():
                break
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # without a pid namespace no other process waits for them
        for pid in self.children:
            os.waitpid(pid, 0)

    def _request(self) -> bool:
        """Handle one request; False when the engine is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, _MAX_REQUEST, 1)
        except ConnectionResetError:
            return False
        if not data:
            return False
        channel = descriptors[0]
        self._spawn(json.loads(data)["id"], channel)
        os.close(channel)
        return True

    def _spawn(self, number: int, channel: int) -> None:
        if not self.free:
            self.send({"op": "refused", "id": number, "reason": "no free slot"})
            return
        slot = self.free.pop()
        try:
            pid = os.fork()
        except OSError as error:
            self.free.append(slot)
            self.send({"op": "refused", "id": number, "reason": f"fork: {error}"})
            return
        if pid == 0:
            self._child(channel, slot)
        self.children[pid] = (number, slot)
        # only we reap the child, so its pid is still its own
        pidfd = os.pidfd_open(pid)
        try:
            self.send({"op": "spawned", "id": number}, pidfd)
        finally:
            os.close(pidfd)

    def _child(self, channel: int, slot: int) -> NoReturn:
        try:
            _reset_signals()
            confine.confine(self.walls, self.limits, channel, slot, self.pid)
        except BaseException:
            os._exit(confine.UNCONFINED)
        code = 0
        try:
            runner.Runner(self.importable).serve()
        except BaseException:
            code = 1
        os._exit(code)

    def _reap(self) -> None:
        """Reap our children and, where programs can fork, the orphans of theirs."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self.children:
                continue
            number, slot = self.children.pop(pid)
            self.free.insert(0, slot)
            cpu = usage.ru_utime + usage.ru_stime
            self.send({"op": "exit", "id": number, "status": status, "cpu": cpu})

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        data = [json.dumps(message).encode()]
        ancillary = []
        if descriptor is not None:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        try:
            self.control.sendmsg(data, ancillary)
        except BrokenPipeError:
            os._exit(0)


def refuse_unfit() -> None:
    """Raise RuntimeError in a process with threads or with torch: forks of it hang or take much memory."""
    threads = kernel.thread_count()
    if threads != 1:
        raise RuntimeError(f"the zygote has {threads} threads; a preloaded package starts some")
    if "torch" in sys.modules:
        raise RuntimeError("the zygote has loaded torch; take it out of the preload list")
    if os.environ.get("PYTHONHASHSEED") != "0" or sys.flags.hash_randomization:
        raise RuntimeError("PYTHONHASHSEED=0 had no effect on the zygote")


def _forget_files() -> None:
    """Remove the finders that look at paths: only loaded modules can be imported from now on."""
    sys.path.clear()
    sys.path_hooks.clear()
    sys.path_importer_cache.clear()
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if getattr(finder, "__module__", "") == "_frozen_importlib"
    ]
    os.environ.clear()


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def main() -> None:
    """Start a zygote and serve the engine behind the descriptor of the first argument to its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    zygote = Zygote(control, json.loads(sys.argv[2]))
    try:
        zygote.start()
    except (OSError, RuntimeError, ImportError) as error:
        zygote.send({"op": "failed", "reason": f"{type(error).__name__}: {error}"})
        raise
    zygote.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
