"""A Slurm cluster of this machine alone, started for the tests and stopped after them."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthInfo=socket={place}/munge/socket,cred_expire=5
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes={host} State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why no cluster can be started here; None if one can."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"there is no {program} (Debian: apt-get install {package})"
    if os.geteuid() != 0:
        return "slurmctld and munged are started as root"
    try:
        pwd.getpwnam("munge")
    except KeyError:
        return "there is no user munge"
    return None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """The folder of a running cluster with the partitions low and high; high preempts low."""
    if why := missing():
        pytest.skip(f"no Slurm: {why}")
    place, before = Path(tempfile.mkdtemp(prefix="slurm-")), os.environ.get("SLURM_CONF")
    place.chmod(0o755)  # munged has a user of its own
    os.environ["SLURM_CONF"] = str(place / "slurm.conf")
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _start(place, daemons)
        yield place
    finally:
        subprocess.run(["scancel", "--state=PENDING", "--user=root"], timeout=30, check=False)
        subprocess.run(["scancel", "--signal=KILL", "--user=root"], timeout=30, check=False)
        _wait(lambda: not _told("squeue", "-h"), 40)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(place, ignore_errors=True)


def _start(place: Path, daemons: list[subprocess.Popen[bytes]]) -> None:
    for name in ("state", "spool", "munge", "log"):
        (place / name).mkdir()
    key = place / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for path in (key, key.parent):
        shutil.chown(path, "munge", "munge")
    host = socket.gethostname().partition(".")[0]
    (place / "slurm.conf").write_text(CONFIG.format(host=host, place=place, ports=[_free_port(), _free_port()]))

    def daemon(*command: str, user: str | None = None) -> None:
        with (place / "log" / command[0]).open("wb") as log:
            daemons.append(subprocess.Popen(command, stdout=log, stderr=log, user=user, cwd="/"))

    munge = [f"--{name}-file={place}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    daemon("munged", "--foreground", f"--socket={place}/munge/socket", *munge, user="munge")
    assert _wait((place / "munge" / "socket").exists, 30), "munged did not start"
    daemon("slurmctld", "-D", "-c")
    daemon("slurmd", "-D", "-N", host)
    if not _wait(lambda: "idle" in _told("sinfo", "-h"), 60):
        logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in (place / "log").iterdir())
        pytest.fail(f"no node is idle: {logs}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout


def _wait(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.2)
    return False
