"""Commands on several hosts over the real ssh, pdsh and clush, against an sshd of our own."""

from __future__ import annotations

import contextlib
import getpass
import json
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sshd import Talk, family, handles, have_ended, private_sshd

from samestep.errors import UsageError
from samestep.launch.hosts import transport
from samestep.launch.hosts.transport import (
    VIAS,
    OutputLine,
    agent_command,
    attribute,
    check_installed,
    explain,
    plan,
    start,
)

WAITS = ["/bin/sh", "-c", 'read -r greeting; echo "$$ $greeting"; cat; echo end']
CLUSTER = ["node1", "node2", "node3"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with private_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(params=VIAS)
def via(request):
    return installed(request.param)


@pytest.fixture(params=["ssh", *(pytest.param(via, marks=pytest.mark.prove) for via in VIAS[1:])])
def ssh_first(request):
    """For what ssh says itself, which the others pass on; `make prove` looks whether they do."""
    return installed(request.param)


def installed(via):
    try:
        check_installed(via)
    except UsageError as error:
        pytest.skip(str(error))
    return via


def run(via, server, hosts, command, greeting="hello", ssh_args=""):
    """Runs a command to its end; returns the talk and the exit codes."""
    with Talk(plan(via, hosts, command, f"{server.ssh_args} {ssh_args}"), greeting) as talk:
        return talk, talk.end()


# --- what runs there ---------------------------------------------------------------------------


def test_every_host_reads_the_greeting_as_it_was_given(via, server):
    greeting = json.dumps({"token": "a'b\"c $HOME `id` %h %%  \\n", "addresses": ["10.0.0.1:1"]})
    talk, codes = run(via, server, CLUSTER, ["head", "-n", "1"], greeting)
    assert [talk.lines(host) for host in CLUSTER] == [[greeting]] * 3
    assert codes == dict.fromkeys(CLUSTER, 0)


def test_input_stays_open_until_the_caller_lets_go(via, server):
    with Talk(plan(via, CLUSTER, WAITS, server.ssh_args)) as talk:
        talk.until(lambda: all(talk.lines(host) for host in CLUSTER))
        assert all(one.process.poll() is None for one in talk.started)
        for one in talk.started:
            one.release()
        assert talk.end() == dict.fromkeys(CLUSTER, 0)
        assert [talk.lines(host)[1:] for host in CLUSTER] == [["end"]] * 3


def test_arguments_arrive_as_they_were_given(via, server):
    words = ["a b", "$HOME", "%h %n %%", "it's", '"', "*", "", ";exit 3", "back\\slash"]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    talk, _ = run(via, server, CLUSTER[:2], [sys.executable, "-c", code, *words])
    assert [json.loads(line) for host in CLUSTER[:2] for line in talk.lines(host)] == [words, words]


def test_the_greeting_is_on_no_command_line_and_in_no_environment_there(via, server):
    secret = "4f1c7b0e9d"
    hosts = ["node1", server.alias("sending", SendEnv="SAMESTEP_*")]  # some users' ssh sends variables
    with Talk(plan(via, hosts, ["/bin/sh", "-c", "env; exec cat"], server.ssh_args), secret) as talk:
        talk.until(lambda: all(secret in talk.lines(host) for host in hosts))
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                assert secret.encode() not in file.read_bytes()
        for host in hosts:
            assert [line for line in talk.lines(host) if secret in line] == [secret]


def test_a_line_is_known_by_its_host(via, server):
    script = 'read -r g; set -- $SSH_CONNECTION; echo "from: $3"; echo; echo "node2: not me"; echo "on $3" >&2'
    talk, _ = run(via, server, CLUSTER, ["/bin/sh", "-c", script])
    for host in CLUSTER:
        assert talk.lines(host) == [f"from: {server.address(host)}", "", "node2: not me"]
        said = talk.lines(host, "err")  # with whatever the account's own shell files say there
        assert [line for line in said if line.startswith("on ")] == [f"on {server.address(host)}"]


def test_every_host_has_its_own_exit_code(via, server):
    _, codes = run(via, server, CLUSTER, ["/bin/sh", "-c", "set -- $SSH_CONNECTION; exit ${3##*.}"])
    assert codes == {"node1": 1, "node2": 2, "node3": 3}


def test_all_hosts_start_however_few_the_users_settings_start_at_a_time(via, server, monkeypatch, tmp_path):
    monkeypatch.setenv("FANOUT", "1")
    monkeypatch.setenv("CLUSTERSHELL_CFGDIR", str(tmp_path))
    (tmp_path / "clush.conf").write_text("[Main]\nfanout: 1\n")
    with Talk(plan(via, CLUSTER, WAITS, server.ssh_args)) as talk:
        talk.until(lambda: all(talk.lines(host) for host in CLUSTER))


def test_a_user_may_stand_before_a_host(via, server):
    hosts = [f"{getpass.getuser()}@node1", "node2"]
    talk, codes = run(via, server, hosts, ["id", "-un"])
    assert [talk.lines(host) for host in hosts] == [[getpass.getuser()]] * 2
    assert codes == dict.fromkeys(hosts, 0)


def test_hosts_of_one_domain_keep_their_full_names(via, server):
    hosts = [server.alias(f"node{number}.cluster.example", HostName=f"127.0.0.{number}") for number in (1, 2)]
    talk, codes = run(via, server, hosts, ["/bin/sh", "-c", "set -- $SSH_CONNECTION; echo $3; exit 5"])
    assert [talk.lines(host) for host in hosts] == [["127.0.0.1"], ["127.0.0.2"]]
    assert codes == dict.fromkeys(hosts, 5)


def test_hosts_may_be_addresses(via, server):
    hosts = [server.alias(address) for address in ("127.0.0.1", "127.0.0.2")]
    talk, codes = run(via, server, hosts, ["/bin/sh", "-c", "echo here; exit 6"])
    assert [talk.lines(host) for host in hosts] == [["here"], ["here"]]
    assert codes == dict.fromkeys(hosts, 6)


# --- who ends ----------------------------------------------------------------------------------


def test_nothing_is_left_when_the_transport_is_killed(via, server):
    with Talk(plan(via, CLUSTER, WAITS, server.ssh_args)) as talk:
        talk.until(lambda: all(talk.lines(host) for host in CLUSTER))
        there = handles(talk.lines(host)[0].split()[0] for host in CLUSTER)
        assert len(there) == len(CLUSTER)
        here = [handle for one in talk.started for handle in family(one.process.pid)]
        for one in talk.started:
            one.process.send_signal(signal.SIGKILL)
        assert have_ended(there)
        assert have_ended(here)


def test_nothing_is_left_when_the_caller_is_killed(via, server):
    caller = textwrap.dedent(f"""
        import sys
        from samestep.launch.hosts.transport import plan, start
        started = start(plan({via!r}, {CLUSTER}, {WAITS}, {server.ssh_args!r}), "hello")
        for one in started:
            for host in one.start.hosts:
                print(one.parse_line(one.process.stdout.readline()).text.split()[0], one.process.pid, flush=True)
        sys.stdin.read()
    """)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", caller], stdin=pipe, stdout=pipe, text=True) as process:
        pids = [tuple(map(int, process.stdout.readline().split())) for _ in CLUSTER]
        there = handles(pid for pid, _ in pids)
        assert len(there) == len(CLUSTER)
        here = [handle for pid in {pid for _, pid in pids} for handle in family(pid)]
        process.kill()
        assert have_ended(there)
        assert have_ended(here)


# --- what is said about a failure ---------------------------------------------------------------


def failure(via, server, host, command, ssh_args=""):
    """Lets a command fail on `host` and succeed on node1; returns what is said about the first."""
    talk, codes = run(via, server, [host, "node1"], command, ssh_args=ssh_args)
    said = explain(host, via, codes[host], "\n".join(talk.lines(host, "err")), command[0])
    assert said.startswith(f"host {host}: ")
    assert "\n" not in said
    return said, talk, codes


OK = ["/bin/sh", "-c", "echo fine"]


def test_a_bad_host_spoils_no_good_one(via, server):
    bad = server.alias("bad.invalid", HostName="bad.invalid")
    said, talk, codes = failure(via, server, bad, OK)
    assert "its name is unknown" in said
    assert codes == {bad: 255, "node1": 0}
    assert talk.lines("node1") == ["fine"]


def test_a_closed_port_is_named(ssh_first, server):
    with socket.socket() as closed:  # bound and not listening: nobody else can open it meanwhile
        closed.bind(("127.0.0.1", 0))
        host = server.alias("closed", Port=closed.getsockname()[1])
        said, _, codes = failure(ssh_first, server, host, OK)
    assert "nothing listens there; start sshd" in said
    assert codes[host] == 255


def test_a_host_that_does_not_answer_is_named(ssh_first, server):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = server.alias("silent", Port=silent.getsockname()[1])
        said, _, _ = failure(ssh_first, server, host, OK, "-o ConnectTimeout=1")
    assert "does not answer" in said
    assert f"`ssh {host} true`" in said


def test_a_host_that_hangs_up_is_named(ssh_first, server):
    host = server.alias("closing", ProxyCommand="head -c 8 > /dev/null")
    assert "hangs up before any login" in failure(ssh_first, server, host, OK)[0]


def test_a_refused_key_is_named(ssh_first, server):
    host = server.alias("locked", IdentityFile=server.other_key)
    assert (
        f"does not accept your key; put it there with `ssh-copy-id {host}`" in failure(ssh_first, server, host, OK)[0]
    )


def test_an_unknown_host_key_is_named(ssh_first, server):
    host = server.alias("stranger", StrictHostKeyChecking="yes")
    assert f"its key is not known here; connect once with `ssh {host}`" in failure(ssh_first, server, host, OK)[0]


def test_a_changed_host_key_is_named(ssh_first, server, tmp_path):
    wrong = " ".join(server.other_key.with_suffix(".pub").read_text().split()[:2])
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {wrong}\n")
    host = server.alias("changed", StrictHostKeyChecking="yes", UserKnownHostsFile=tmp_path / "known_hosts")
    assert f"`ssh-keygen -R {host}`" in failure(ssh_first, server, host, OK)[0]


def test_a_missing_interpreter_is_named(ssh_first, server):
    said, _, codes = failure(ssh_first, server, "node2", ["/no/such/python", "-m", "samestep.launch.agent"])
    assert "there is no /no/such/python on it; name the interpreter there with --remote-python PATH" in said
    assert codes["node2"] == 127


def test_an_interpreter_that_is_none_is_named(ssh_first, server):
    said, _, _ = failure(ssh_first, server, "node2", ["/etc/passwd", "-m", "samestep.launch.agent"])
    assert "/etc/passwd cannot be executed there" in said


def test_a_host_without_samestep_is_named(ssh_first, server):
    command = [sys.executable, "-I", "-S", "-m", "samestep.launch.agent"]  # -S: no site-packages
    said, _, codes = failure(ssh_first, server, "node2", command)
    source = transport._source()
    assert f"samestep is missing there; copy {source} to it and run `{sys.executable} -m pip install {source}`" in said
    assert (Path(source) / "pyproject.toml").exists() or source.endswith(".whl")
    assert codes["node2"] == 1


def test_a_host_with_another_samestep_is_named(ssh_first, server):
    command = [*agent_command()[:-1], "samestep.launch.of_next_year"]
    assert "of another version" in failure(ssh_first, server, "node2", command)[0]


def test_wrong_options_for_ssh_are_named(ssh_first, server):
    assert "ssh does not understand its options: " in failure(ssh_first, server, "node2", OK, "-o NoSuchOption=1")[0]


def test_anything_else_ends_with_the_last_line(via, server):
    script = "echo first >&2; echo the disk is full >&2; exit 9"
    said, _, _ = failure(via, server, "node2", ["/bin/sh", "-c", script])
    assert said == "host node2: the command ended there with exit code 9: the disk is full"


def test_remarks_of_ssh_are_no_reason():
    stderr = "the disk is full\nWarning: Permanently added 'a' (ED25519) to the list of known hosts.\n"
    assert explain("a", "ssh", None, stderr) == "host a: ssh ended early: the disk is full"
    assert explain("a", "ssh", 255, "") == "host a: ssh could not connect, without a word; try `ssh a true`"


# --- what is started here ------------------------------------------------------------------------


def test_the_exact_commands(monkeypatch):
    monkeypatch.delenv("PDSH_SSH_ARGS_APPEND", raising=False)
    monkeypatch.setattr(transport, "program_named", lambda name: f"/usr/bin/{name}")
    options = "-F 'my config' -T -x -a -o BatchMode=yes -o ConnectTimeout=4"
    hosts, command, ours = ["a", "b"], ["/py", "-m", "x y"], "-F 'my config'"
    assert [str(one) for one in plan("ssh", hosts, command, ours)] == [
        f"""ssh {options} -- a '/py -m '"'"'x y'"'"''""",
        f"""ssh {options} -- b '/py -m '"'"'x y'"'"''""",
    ]
    (pdsh,) = plan("pdsh", hosts, command, ours)
    feeder = f"env {shlex.quote(sys.executable)} -P -m samestep.launch.hosts.transport"
    assert str(pdsh) == f"""pdsh -S -f 2 -R exec -w a,b {feeder} ssh {options} -- %h '/py -m '"'"'x y'"'"''"""
    (clush,) = plan("clush", hosts, command, ours)
    assert clush.argv[:9] == ("/usr/bin/clush", "-S", "-R", "ssh", "-f", "2", "-t", "4", "--color=never")
    assert clush.argv[9:] == ("-w", "a,b", "-o", options, "/py -m 'x y'")
    assert pdsh.hosts == clush.hosts == ("a", "b")


def test_pdsh_runs_once_for_each_user():
    first, second, third = plan("pdsh", ["a", "me@b", "c", "you@d"], ["x"])
    assert [one.hosts for one in (first, second, third)] == [("a", "c"), ("me@b",), ("you@d",)]
    assert [one.argv[-2] for one in (first, second, third)] == ["%h", "me@%h", "you@%h"]


def test_what_a_user_has_set_for_the_ssh_of_pdsh_counts(monkeypatch):
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-o 'User=me' -p 50%")
    (one,) = plan("pdsh", ["a"], ["x"])
    assert one.argv[-7:] == ("-o", "User=me", "-p", "50%%", "--", "%h", "x")


def test_the_agent_runs_by_its_full_path():
    assert agent_command() == [sys.executable, "-P", "-m", "samestep.launch.agent"]
    assert agent_command("/opt/python")[0] == "/opt/python"
    assert Path(agent_command()[0]).is_absolute()


def test_pdsh_shortens_names_only_where_it_does_no_harm():
    (one,) = plan("pdsh", ["a.x", "b.x", "c"], ["true"])
    assert attribute(one, "a: text: more") == OutputLine("a.x", "text: more")
    assert attribute(one, "pdsh@head: b: env exited with exit code 7").exit_code == 7
    assert attribute(one, "pdsh@head: c: env killed by signal 9") == OutputLine(
        "c", "pdsh@head: c: env killed by signal 9", 128 + 9
    )
    (one,) = plan("pdsh", ["a.x", "a.y"], ["true"])
    assert attribute(one, "a.y: text").host == "a.y"
    assert attribute(one, "a: text") == OutputLine(None, "a: text")


def test_a_line_of_nobody_stays_whole():
    (one,) = plan("clush", ["a"], ["true"])
    assert attribute(one, "Warning: something: else") == OutputLine(None, "Warning: something: else")


@pytest.mark.parametrize(("via", "package"), [("ssh", "openssh-client"), ("pdsh", "pdsh"), ("clush", "clustershell")])
def test_a_missing_program_is_named_before_anything_starts(via, package, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(transport.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match=rf"{via} is not installed here: `apt-get install {package}`"):
        start(plan(via, ["a"], ["true"]), "hello")


def test_pdsh_and_clush_without_ssh_are_refused(monkeypatch, tmp_path):
    for program in ("pdsh", "clush"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for via in ("pdsh", "clush"):
        with pytest.raises(UsageError, match="ssh is not installed here"):
            check_installed(via)


def test_what_cannot_be_started_is_refused():
    with pytest.raises(UsageError, match="over ssh, pdsh or clush, and 'telnet' is none"):
        plan("telnet", ["a"], ["true"])
    with pytest.raises(UsageError, match="No closing quotation"):
        plan("ssh", ["a"], ["true"], "-F 'config")
    for greeting in ("two\nlines", "nul\0", "x" * 40_000):
        with pytest.raises(ValueError, match="one line"):
            start([], greeting)


def test_nothing_stays_when_one_of_several_cannot_be_started(server, monkeypatch):
    check_installed("ssh")
    before = set(server.sessions())
    good = plan("ssh", ["node1"], WAITS, server.ssh_args)
    bad = [transport.Start(via="ssh", hosts=("node2",), argv=("/no/such/ssh",))]
    made = []
    popen = subprocess.Popen
    monkeypatch.setattr(transport.subprocess, "Popen", lambda *a, **k: made.append(popen(*a, **k)) or made[-1])
    with pytest.raises(FileNotFoundError):
        start([*good, *bad], "hello")
    assert [process.poll() for process in made] == [-signal.SIGKILL]
    assert have_ended(handles(set(server.sessions()) - before))
