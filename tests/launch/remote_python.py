"""What stands for Python on a host of the tests: asks for a fork where a module of samestep is to run.

    sshd ── python -I -S remote_python.py SOCKET -P -m samestep.launch.agent
                  └── arguments, variables, standard streams ──►  namespaces.py  ──►  the session's fork server

It waits for the fork and ends as it does. Whatever else it is asked for, it becomes the interpreter itself.
"""

import json
import os
import socket
import sys

if __name__ == "__main__":  # pytest imports every file of tests
    _, place, *words = sys.argv
    if words[:2] != ["-P", "-m"] or not words[2].startswith("samestep"):
        os.execv(sys.executable, [sys.executable, *words])
    about = {
        "arguments": words[2:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109  (pathlib would take half of the time of a start)
        "namespaces": [f"/proc/{os.getpid()}/ns/{kind}" for kind in ("net", "uts")],
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(place)
        socket.send_fds(link, [json.dumps(about).encode()], [0, 1, 2])
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        code = int(link.recv(16) or 1)
    os._exit(code if code >= 0 else 128 - code)
