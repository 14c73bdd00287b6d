"""The other side of `sandbox.py`: an interpreter behind namespaces and limits.

A program of its own, of the standard library alone. Two processes. The guard sets things up, and ends everything
when the interpreter, its parent or an order ends it. The interpreter runs the model's code and is PID 1 of its
namespace, so that nothing outlives it.
"""

import ast
import contextlib
import ctypes
import io
import json
import linecache
import os
import resource
import select
import shutil
import signal
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

NOBODY = 65534
REFUSED = 3  # exit status: the kernel does not let it be isolated
FILES = 4096  # in the working folder
NAME = "<python>"  # of the model's code in tracebacks
READY = DONE = b"."

# Empty in the sandbox, but for KEPT and the interpreter itself.
HIDDEN = ("/tmp", "/var/tmp", "/run", "/dev", "/root", "/home", "/mnt", "/media")
KEPT = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", sys.base_prefix, sys.prefix)

SPACES = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWPID | os.CLONE_NEWIPC
LIBC = ctypes.CDLL(None, use_errno=True)
BIND, RECURSIVE, PRIVATE, NOSUID, NODEV = 0x1000, 0x4000, 0x40000, 0x2, 0x4  # <sys/mount.h>
READ_ONLY, SET_ATTRIBUTES, BELOW, HERE = 0x1, 442, 0x8000, -100  # mount_setattr
DEATH_SIGNAL, DUMPABLE, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 36, 38  # <sys/prctl.h>
CAPABILITIES = 0x20080522  # version 3 of capset


def main() -> None:
    given = json.loads(sys.argv[1])
    parent = os.pidfd_open(given["parent"])
    if os.getppid() != given["parent"]:
        return
    try:
        if given["isolated"]:
            _leave()
    except OSError as error:
        _refuse(given, error)
    _checked(LIBC.prctl(SUBREAPER, 1))
    interpreter = os.fork()
    if interpreter == 0:
        _interpret(given)
        os._exit(0)
    os.close(given["control"])
    os.close(given["output"])
    status = _guard(interpreter, parent)
    if not given["isolated"]:
        shutil.rmtree(given["folder"], ignore_errors=True)
    os._exit(status if status >= 0 else 128 - status)


def _refuse(given: dict[str, Any], error: OSError) -> None:
    os.write(given["output"], str(error).encode())
    os._exit(REFUSED)


def _guard(interpreter: int, parent: int) -> int:
    """Waits until one of them ends or a byte comes in, then ends all; the interpreter's status, negative: a signal."""
    select.select([os.pidfd_open(interpreter), parent, 0], [], [])
    with contextlib.suppress(ProcessLookupError):
        os.kill(interpreter, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(interpreter, 0)[1])
    while orphans := list(_children()):  # without a namespace what it left behind comes to the guard
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)
    return status


def _children() -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        yield from map(int, file.read().split())


def _interpret(given: dict[str, Any]) -> None:
    isolated = given["isolated"]
    try:
        if isolated:
            _hide(given["home"])
            os.makedirs(given["folder"], exist_ok=True)
            _mount_read_only()
            _show_own_processes()
            _mount(
                "tmpfs",
                given["folder"],
                "tmpfs",
                NOSUID | NODEV,
                f"size={given['disk_mb']}m,nr_inodes={FILES},mode=1777",
            )
            _give_up_rights()
        _checked(LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL))
    except OSError as error:
        _refuse(given, error)
    os.chdir(given["folder"])
    _limit(given)
    sys.path[:] = [path for path in sys.path if path.startswith((sys.base_prefix, sys.prefix))]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _serve(given["control"], given["output"], isolated)


def _leave() -> None:
    """Into namespaces of its own, as root directly, as a user through a user namespace."""
    if os.geteuid() != 0:
        _enter_user_namespace()
    os.unshare(SPACES)


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    os.unshare(os.CLONE_NEWUSER)
    for name, text in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _hide(home: str) -> None:
    """Empties the folders that may hold what is not the model's: secrets, sockets of other programs, devices."""
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    kept = {path: os.open(path, os.O_PATH) for path in KEPT if os.path.exists(path)}
    folders = _outermost({os.path.realpath(path) for path in (*HIDDEN, home) if os.path.isdir(path)} - {"/"})
    for folder in folders:
        _mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, "mode=0755")
    for path, descriptor in kept.items():
        if any(_beneath(path, folder) or _beneath(os.path.realpath(path), folder) for folder in folders):
            _put_back(path, descriptor)
        os.close(descriptor)


def _outermost(folders: set[str]) -> list[str]:
    return [folder for folder in folders if not any(_beneath(folder, other) for other in folders)]


def _beneath(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")


def _show_own_processes() -> None:
    try:
        _mount("proc", "/proc", "proc", NOSUID | NODEV)
    except PermissionError:  # a container that masks parts of /proc
        _mount("tmpfs", "/proc", "tmpfs", NOSUID | NODEV, "mode=0755")


def _put_back(path: str, descriptor: int) -> None:
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        open(path, "a").close()
    _mount(source, path, None, BIND | RECURSIVE)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _checked(LIBC.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), target)


def _mount_read_only() -> None:
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)  # set, clear, propagation, user namespace
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _checked(LIBC.syscall(SET_ATTRIBUTES, HERE, b"/", BELOW, ctypes.byref(attributes), size), "/")


def _give_up_rights() -> None:
    """Root becomes nobody, in a user namespace where processes are counted from zero. No capability stays."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        _checked(LIBC.prctl(DUMPABLE, 1))  # else its files in /proc are root's
        _enter_user_namespace()
    header = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
    _checked(LIBC.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())))


def _checked(result: int, what: str = "") -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _limit(given: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: given["memory_mb"] << 20,
        resource.RLIMIT_CPU: given["cpu_s"],
        resource.RLIMIT_FSIZE: given["disk_mb"] << 20,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if given["isolated"]:  # elsewhere the user's other processes would count
        limits[resource.RLIMIT_NPROC] = given["processes"]
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, this goes first, not the trainer
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _serve(control: int, output: int, isolated: bool) -> None:
    """Runs what comes over `control`, a length and then the code, and answers with a byte when it is done."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    own = os.getpid()
    os.write(control, READY)
    while (code := _received(control)) is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
        printed = sys.stdout = _writer(1, -1)
        sys.stderr = _writer(2, 1)
        _run(code, main.__dict__)
        with contextlib.suppress(OSError, ValueError):
            printed.flush()
        if os.getpid() != own:  # a process that the code forked
            os._exit(0)
        if isolated and own == 1:
            _end_others()
        os.write(control, DONE)


def _writer(descriptor: int, buffering: int) -> io.TextIOWrapper:
    return open(descriptor, "w", buffering, encoding="utf-8", errors="backslashreplace", closefd=False)


def _received(control: int) -> str | None:
    size = _exactly(control, 4)
    return None if size is None else (_exactly(control, int.from_bytes(size)) or b"").decode()


def _exactly(control: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        if not (part := os.read(control, size - len(data))):
            return None
        data += part
    return data


def _run(code: str, names: dict[str, Any]) -> None:
    """As at a prompt: the value of a last expression is printed, and what is raised."""
    try:
        body = ast.parse(code, NAME).body
        linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), NAME, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NAME, "eval"), names)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the session goes on
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


def _end_others() -> None:
    """All other processes of this PID namespace, which is only sound in one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main()
