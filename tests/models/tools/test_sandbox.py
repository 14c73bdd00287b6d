"""Python for the model: what stays from call to call, what it may not do, and that nothing of it is left."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from models.tools.sandbox import Python

GONE_S = 10.0
# 60 children at most, each of which stays: should the limit break, the machine is to survive this.
BOMB = "import os, time\nfor _ in range(60):\n    if os.fork() == 0: time.sleep(20); os._exit(0)"
ZERO = "ZeroDivisionError: division by zero\n"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def namespaces_are_allowed() -> bool:
    flags = "os.CLONE_NEWNET" if os.geteuid() == 0 else "os.CLONE_NEWUSER | os.CLONE_NEWNET"
    return (
        subprocess.run([sys.executable, "-c", f"import os; os.unshare({flags})"], capture_output=True).returncode == 0
    )


pytestmark = pytest.mark.skipif(not namespaces_are_allowed(), reason="this machine allows no namespaces")


@pytest.fixture
def python() -> Iterator[Python]:
    made = Python(timeout_s=20.0)
    yield made
    made.close()


def family(of: Python) -> list[psutil.Process]:
    """Guard, interpreter, and what the code started."""
    assert of._session is not None
    guard = psutil.Process(of._session.pid)
    return [guard, *guard.children(recursive=True)]


def still_there(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end soon. An ended one may wait for the system's first process to take note of it."""
    end = time.monotonic() + GONE_S
    while (running := [process for process in processes if is_alive(process)]) and time.monotonic() < end:
        time.sleep(0.01)
    return running


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_starts_at_the_first_call() -> None:
    before = psutil.Process().children()
    made = Python()
    assert psutil.Process().children() == before
    made.close()


def test_variables_stay(python: Python) -> None:
    assert python("x = [1]\nx.append(2)") == ""
    assert python("print('so', x)\nsum(x)") == "so [1, 2]\n3\n"
    assert python("def f(n): return n * 10\nNone") == ""
    assert python("f(4)") == "40\n"


def test_trajectories_share_nothing(python: Python) -> None:
    other = Python()
    assert python("x = 1\nopen('a', 'w').write('b')") == "1\n"
    assert other("import os\nos.listdir(), 'x' in globals()") == "([], False)\n"
    other.close()


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("def f(n): return n / 0\nf(1)", "in f\n    def f(n): return n / 0\n" + " " * 21 + "~~^~~\n" + ZERO),
        ("1 +", "SyntaxError: invalid syntax\n"),
        ("exit(3)", "SystemExit: 3\n"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt\n"),
        ("input()", "EOFError: EOF when reading a line\n"),
        ("print('\\ud800')", "\\ud800\n"),
        ("import sys; sys.stdout.close(); sys.stdout = None", ""),
        ("import subprocess\nsubprocess.run(['echo', 'hi'])\nNone", "hi\n"),
        ("import numpy\nint(numpy.arange(4).sum())", "6\n"),
    ],
)  # fmt: skip
def test_tells_what_is_printed_and_raised(python: Python, code: str, end: str) -> None:
    python("x = 7")
    assert python(code).endswith(end)
    assert python("x") == "7\n"


def test_long_output_is_cut(python: Python) -> None:
    """4,000 of 100,001 are shown."""
    shown = python("print('a' * 100_000)")
    assert "\n[96001 characters left out]\n" in shown
    assert shown.count("a") == 4_000 - 1 + 2  # not the line's end, but those of "characters"


def test_output_without_end_ends_it(python: Python) -> None:
    assert python("while True: print('a' * 10_000)").endswith("[it printed more than 4 MB; the interpreter was ended]")


def test_a_loop_without_end_is_ended_and_the_next_call_is_told() -> None:
    made = Python(timeout_s=2.0)  # which suffices for the other calls, also beside other work
    made("x = 1")
    before = family(made)
    assert made("print('on')\nimport sys; sys.stdout.flush()\nwhile True: pass") == (
        "on\n\n[it took too long; the interpreter was ended]"
    )
    assert still_there(before) == []
    assert made("'x' in globals()") == "[a new interpreter: earlier variables are gone]\nFalse\n"
    assert made("1") == "1\n"
    made.close()


def test_cpu_time_is_limited_over_calls() -> None:
    made = Python(timeout_s=30.0, cpu_s=1)
    assert made("while True: pass") == "[the process was ended by SIGKILL; the interpreter was ended]"
    made.close()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(3)", "ended with status 3"),
        ("import ctypes; ctypes.string_at(0)", "ended by SIGSEGV"),
    ],
)
def test_a_crash_is_told(python: Python, code: str, reason: str) -> None:
    assert python(code) == f"[the process {'was ' * ('SIG' in reason)}{reason}; the interpreter was ended]"
    assert python("1") == "[a new interpreter: earlier variables are gone]\n1\n"


def test_memory_is_limited(python: Python) -> None:
    assert python("x = 1\nb = bytearray(2 << 30)").endswith("MemoryError\n")
    assert python("x") == "1\n"


def test_files_are_limited_in_size_and_number_and_cores(python: Python) -> None:
    """64 MB, 256 open at a time, and none of a crash."""
    code = "from resource import *\n[getrlimit(each)[1] for each in (RLIMIT_FSIZE, RLIMIT_NOFILE, RLIMIT_CORE)]"
    assert python(code) == f"{[64 << 20, 256, 0]}\n"


def test_a_forked_process_does_not_go_on_as_the_interpreter(python: Python) -> None:
    python("import os\nx = 1\nchild = os.fork()\nif child: os.waitpid(child, 0)\nelse: x = 2")
    assert python("x") == "1\n"


def test_the_project_cannot_be_imported(python: Python) -> None:
    """However it is installed here."""
    assert python("import models.tools").endswith("ModuleNotFoundError: No module named 'models'\n")


def test_when_memory_runs_out_it_goes_first(python: Python) -> None:
    assert python("open('/proc/self/oom_score_adj').read()") == "'1000\\n'\n"


def test_a_fork_bomb_is_bounded_and_over_with_its_call(python: Python) -> None:
    python("x = 1")
    assert "Resource temporarily unavailable" in python(BOMB)
    assert len(family(python)) == 2
    assert python("x") == "1\n"


def test_what_a_call_starts_ends_with_it(python: Python) -> None:
    code = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)\n  os._exit(0)"
    python(code)
    assert len(family(python)) == 2
    assert python("import os\nos.system('sleep 1000 &')") == "0\n"
    assert len(family(python)) == 2


def test_files(python: Python) -> None:
    """The working folder is its own and has 64 MB; the rest can be read at most, folders of users not even that."""
    secret = Path(f"/tmp/rollbook-secret-{os.getpid()}")
    secret.write_text("hush")
    try:
        assert "FileNotFoundError" in python(f"open({str(secret)!r}).read()")
    finally:
        secret.unlink()
    assert python("import os\nopen('a.txt', 'w').write('hello')\nos.listdir()") == "['a.txt']\n"
    assert not Path("/tmp/work/a.txt").exists()
    for path in ("/etc/x", "/usr/x", f"{Path(__file__).parent}/x"):
        assert "Error" in python(f"open({path!r}, 'w')")
    assert "No space left on device" in python(
        "for i in range(9):\n  with open(str(i), 'wb') as f: f.write(bytes(10 << 20))"
    )
    assert "No space left on device" in python("for i in range(5_000): open(f'f{i}', 'w').close()")
    assert python("sorted(os.listdir('/dev'))") == "['null', 'random', 'urandom', 'zero']\n"


def test_the_home_is_hidden_but_for_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is, and whether or not it lies in a folder that is hidden anyway."""
    home = Path(sys.prefix).parent
    if home.is_relative_to("/tmp"):
        pytest.skip("this Python lies below /tmp, which then shows the way to it")
    for folder, shown in {str(home): [Path(sys.prefix).name], "/tmp": ["work"]}.items():
        monkeypatch.setenv("HOME", folder)
        made = Python()
        assert made(f"import numpy, os\nos.listdir({folder!r})") == f"{shown}\n"
        made.close()


def test_secrets_of_the_environment_are_not_there(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in its own environment nor in that of another process of the same user, which has one for sure."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    other = subprocess.Popen(["sleep", "60"], env={"SECRET": "hush"})
    try:
        shown = python(
            "import glob, os\nprint(dict(os.environ))\n"
            "for path in glob.glob('/proc/*/environ'):\n"
            "  try: print(path, open(path).read())\n"
            "  except OSError as error: print(path, error)"
        )
    finally:
        other.kill()
        other.wait()
    assert "PATH" in shown
    assert "hush" not in shown
    assert "/proc/1/environ" in shown  # its own
    assert str(other.pid) not in shown


def test_no_network(python: Python) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        shown = python(f"import socket\nsocket.create_connection({server.getsockname()!r}, 2)")
        with pytest.raises(TimeoutError):
            server.accept()
    assert "Error" in shown


def test_no_rights(python: Python) -> None:
    assert python("import os\nos.getuid() != 0, os.getpid()") == "(True, 1)\n"
    assert "Operation not permitted" in python("os.chroot('/')")
    mount = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    remount = "libc.mount(None, b'/', None, ctypes.c_ulong(0x20 | 0x1000), None)"  # MS_REMOUNT | MS_BIND, to write
    assert python(f"{mount}{remount}, os.strerror(ctypes.get_errno())") == "(-1, 'Operation not permitted')\n"
    assert python("libc.prctl(39, 0, 0, 0, 0)") == "1\n"  # PR_GET_NO_NEW_PRIVS: no program that is root's helps
    nested = "os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)\n"
    assert python(f"{nested}{remount}, os.strerror(ctypes.get_errno())") == "(-1, 'Operation not permitted')\n"


def test_code_that_is_too_long_is_refused(python: Python) -> None:
    with pytest.raises(ValueError, match="200000 bytes; at most 100000"):
        python("#" * 200_000)


def test_close_ends_a_call_in_another_thread() -> None:
    made = Python(timeout_s=300.0)
    made("1")
    before = family(made)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(made, "while True: pass")
        while before[1].cpu_percent() == 0.0:
            time.sleep(0.05)
        made.close()
        assert "the interpreter was ended" in call.result(GONE_S)
    assert still_there(before) == []
    with pytest.raises(RuntimeError, match="closed"):
        made("1")


def test_nothing_is_left() -> None:
    """Of twelve, a third have their guard killed, a third their interpreter; all are closed, some twice."""
    made = [Python() for _ in range(12)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda each: each("1"), made)) == ["1\n"] * 12
        families = [family(each) for each in made]
        assert [len(each) for each in families] == [2] * 12
        for guard, interpreter in families[:4]:
            guard.kill()
            assert still_there([interpreter]) == []
        for _, interpreter in families[4:8]:
            interpreter.kill()
        assert made[0]("2") == "[a new interpreter: earlier variables are gone]\n2\n"
        families.append(family(made[0]))
        list(pool.map(Python.close, [*made, *made[:6]]))
    assert still_there([process for each in families for process in each]) == []


def run(program: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)


def test_lives_beyond_its_first_thread_and_ends_with_the_process() -> None:
    """Though a process that was forked meanwhile holds the other ends of its pipes, and lives on."""
    program = run(
        "import os, threading, time\n"
        "from models.tools.sandbox import Python\n"
        "made = Python()\n"
        "first = threading.Thread(target=made, args=('x = 1',)); first.start(); first.join()\n"
        "time.sleep(0.2)\n"
        "forked = os.fork()\n"
        "if forked: print(made('x').strip(), made._session.pid, forked, flush=True)\n"
        "time.sleep(1000)"
    )
    assert program.stdout is not None
    x, pid, forked = program.stdout.readline().split()
    guard = psutil.Process(int(pid))
    processes = [guard, *guard.children(recursive=True)]
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    try:
        assert x == "1"
        assert len(processes) == 2
        assert still_there(processes) == []
    finally:
        os.kill(int(forked), signal.SIGKILL)


@needs_root
def test_as_an_ordinary_user() -> None:
    """Whose Python must be reachable: its folders are shown as the sandbox shows them."""
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("this Python lies below /tmp, which is hidden from an ordinary user")
    program = run(
        "import os\n"
        "from models.tools import sandbox, sandbox_child\n"
        "os.unshare(os.CLONE_NEWNS)\n"
        "sandbox_child._hide('/root')\n"
        "os.setgroups([]); os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000)\n"
        "made = sandbox.Python()\n"
        "print(made('import os, socket\\nos.getuid(), os.getpid(), os.listdir()'))\n"
        "print(made('socket.create_connection((\"127.0.0.1\", 1))'))\n"
        f"print(made({BOMB!r}))\n"
        "made.close()"
    )
    shown, _ = program.communicate(timeout=60)
    assert shown.startswith("(1000, 1, [])\n")
    assert "OSError: [Errno 101] Network is unreachable" in shown
    assert "Resource temporarily unavailable" in shown


def test_refuses_where_it_cannot_be_isolated() -> None:
    """In a user namespace that may have no other one."""
    program = run(
        "import os\n"
        "os.unshare(os.CLONE_NEWUSER)\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "from models.tools.sandbox import Python, SandboxRefused\n"
        "try: Python()\n"
        "except SandboxRefused as error: print(error)\n"
        "made = Python(isolated=False)\n"
        "print(made('6 * 7'))"
    )
    shown, _ = program.communicate(timeout=60)
    assert "cannot be isolated on this machine ([Errno 28] No space left on device)" in shown
    assert "environment.options.python.isolated = false" in shown
    assert shown.endswith("42\n\n")


def test_not_isolated_still_has_limits_and_leaves_nothing() -> None:
    """Not even a process that left its session, and its parents: it comes to the guard."""
    made = Python(isolated=False, cpu_s=30)
    folder = Path(made("import os, time\nprint(os.getcwd())").strip())
    assert folder.is_dir()
    made(
        "if os.fork() == 0:\n  os.setsid()\n"
        "  if os.fork() == 0: open('pid', 'w').write(str(os.getpid())); time.sleep(1000)\n  os._exit(0)\n"
        "os.wait()\n"
        "while not (os.path.exists('pid') and os.path.getsize('pid')): time.sleep(0.01)"
    )
    sleeper = psutil.Process(int((folder / "pid").read_text()))
    processes = family(made)
    assert sleeper in processes
    assert made("b = bytearray(2 << 30)").endswith("MemoryError\n")
    assert made("import resource\nresource.getrlimit(resource.RLIMIT_CPU)") == "(30, 30)\n"
    assert "HOME" in made("sorted(os.environ)")
    made.close()
    assert still_there(processes) == []
    assert not folder.exists()
