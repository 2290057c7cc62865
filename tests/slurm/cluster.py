"""A real Slurm of one node in private folders and on free ports: controller, node, accounting and its database.

Nothing here touches a Slurm, a database or a munge of the machine. Every daemon is a child in a session of its own and
is ended by its process id. Needs root, as slurmd and its cgroups do, and what `tests/slurm/setup` installs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from capsule.host.process import descendants

PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "sbatch", "sacct", "munged", "mariadbd", "mariadb-install-db")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATIENCE_SECONDS = 60.0

SLURM_CONF = """\
ClusterName=capsuletest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ProctrackType={proctrack}
TaskPlugin=task/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,requeue_delay=1
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=0
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={root}/munge/socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,safe
GresTypes=gpu
ReturnToService=2
MailProg=/bin/true
KillWait={kill_wait}
SlurmdTimeout=5
MessageTimeout=5
InactiveLimit=0
MinJobAge=60
DefMemPerNode=500
NodeName={host} NodeAddr=127.0.0.1 Port={slurmd_port} CPUs={cpus} RealMemory=1500 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=60 State=UP
"""

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
LogFile={root}/slurmdbd.log
PidFile={root}/slurmdbd.pid
"""

CGROUP_CONF = """\
CgroupPlugin={plugin}
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
"""


def missing_words() -> str | None:
    """Return what this machine lacks for a Slurm of its own, in words; None if it lacks nothing."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if absent:
        return f"expected {', '.join(absent)}, found none; run tests/slurm/setup, as `make test-slurm` does"
    if os.geteuid() != 0:
        return f"expected root, which slurmd and its cgroups need, found uid {os.geteuid()}"
    return None


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Cluster:
    """One node, its controller and its accounting; `start` brings up what is not running."""

    def __init__(self, *, proctrack: str = "proctrack/cgroup", kill_wait: int = 10) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="capsule-slurm-", dir="/tmp"))
        self.root.chmod(0o755)
        self.host = socket.gethostname().partition(".")[0]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))
        }
        self.environment |= {
            "PATH": PATH,
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "MYSQL_UNIX_PORT": str(self.root / "db.socket"),
        }
        self._ports = {name: free_port() for name in ("ctld_port", "slurmd_port", "dbd_port")}
        self.configure(proctrack=proctrack, kill_wait=kill_wait)

    def configure(self, *, proctrack: str = "proctrack/cgroup", kill_wait: int = 10) -> None:
        """Write every configuration file; daemons read them when they start."""
        plugin = "cgroup/v1" if Path("/sys/fs/cgroup/freezer").is_dir() else "cgroup/v2"
        values = {
            "root": self.root, "host": self.host, "proctrack": proctrack, "kill_wait": kill_wait, "plugin": plugin,
            "cpus": os.cpu_count() or 1, **self._ports,
        }  # fmt: skip
        for name in ("munge", "state", "spool"):
            (self.root / name).mkdir(exist_ok=True)
        texts = {
            "slurm.conf": SLURM_CONF,
            "slurmdbd.conf": SLURMDBD_CONF,
            "cgroup.conf": CGROUP_CONF,
            "gres.conf": "".join(f"Name=gpu File={self.root}/gpu{number}\n" for number in range(2)),
        }
        for name, text in texts.items():
            path = self.root / name
            path.write_text(text.format(**values))
            path.chmod(0o600 if name == "slurmdbd.conf" else 0o644)
        for number, minor in enumerate((3, 5)):
            device = self.root / f"gpu{number}"
            if not device.exists():
                os.mknod(device, 0o20666, os.makedev(1, minor))

    # Daemons.

    def start(self) -> None:
        """Start everything and wait until the node is idle."""
        self.start_munge()
        self.start_database()
        self.start_accounting()
        self.start_controller()
        self.start_node()

    def start_munge(self) -> None:
        folder = self.root / "munge"
        key = folder / "key"
        if not key.exists():
            key.write_bytes(secrets.token_bytes(1024))
            key.chmod(0o400)
        paths = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._daemon("munged", "--foreground", *(f"--{name}={folder / file}" for name, file in paths.items()))
        self._until("munge answers", lambda: (folder / "socket").exists())

    def start_database(self) -> None:
        data = self.root / "db"
        if not data.exists():
            install = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-test-db"]
            self.call(*install, "--auth-root-authentication-method=normal")
        sockets = self.root / "db.socket"
        self._daemon(
            "mariadbd", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-networking", f"--socket={sockets}",
            f"--pid-file={self.root}/db.pid", "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900",
            "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        self._until("the database answers", sockets.exists)

    def start_accounting(self) -> None:
        self._daemon("slurmdbd", "-D")
        self._until("accounting answers", lambda: self.answers("sacctmgr", "-n", "show", "cluster"))
        if not self.call("sacctmgr", "-nP", "show", "cluster").strip():
            self.call("sacctmgr", "-i", "add", "cluster", "capsuletest")
            self.call("sacctmgr", "-i", "add", "account", "science", "Cluster=capsuletest")
            self.call("sacctmgr", "-i", "add", "user", "root", "Account=science", "Cluster=capsuletest")

    def start_controller(self) -> None:
        self._daemon("slurmctld", "-D", "-i")
        self._until("the controller answers", lambda: self.answers("scontrol", "ping"))

    def start_node(self, *, without: Path | None = None) -> None:
        """Start the node, perhaps one that does not have a folder of this machine."""
        hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(without)]
        self._daemon("slurmd", "-D", "-N", self.host, prefix=[] if without is None else hide)
        self._until("the node is idle", lambda: self.node_state().startswith("idle"))

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End one daemon."""
        daemon = self.daemons.pop(name)
        daemon.send_signal(number)
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(20)

    def stop(self) -> None:
        """End everything, and what slurmd left running; nothing stays."""
        with contextlib.suppress(Exception):
            self.call("scancel", "--user=root", timeout=10)
            self._until("jobs are gone", lambda: not self.call("squeue", "-h"), seconds=15)
        for name in ("slurmd", "slurmctld", "slurmdbd", "mariadbd", "munged"):
            if name in self.daemons:
                self.kill(name, signal.SIGTERM)
        for pid in self.step_daemons():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)

    def restore(self) -> None:
        """Bring up what a test brought down, and cancel what it left."""
        if "slurmdbd" not in self.daemons:
            self.start_accounting()
        if "slurmctld" not in self.daemons:
            self.start_controller()
        self.call("scancel", "--user=root")
        if "slurmd" not in self.daemons:
            self.start_node()
        self._until("jobs are gone", lambda: not self.call("squeue", "-h"), seconds=40)
        self._until("the node is idle", lambda: self.node_state() == "idle")

    def forget_jobs(self) -> None:
        """Let the controller lose its state, as with a new disk: it counts job ids from one again."""
        self.kill("slurmctld")
        shutil.rmtree(self.root / "state")
        (self.root / "state").mkdir()
        self.start_controller()

    def lose_node(self) -> None:
        """Let the node die: its daemon, the daemons of its steps and all that they started, at once."""
        steps = self.step_daemons()
        victims = [*steps, *(item.pid for step in steps for item in descendants(step))]
        self.kill("slurmd")
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def lose_end(self, row: int) -> None:
        """Let the accounting have missed the end of a job, as when the controller's message is lost."""
        change = f"update capsuletest_job_table set time_end=0, state=1 where job_db_inx={row}"
        self.call(
            "mariadb", "--no-defaults", f"--socket={self.root}/db.socket", "-u", "root", "slurm_acct", "-e", change
        )

    def repair_accounting(self) -> None:
        """Repair it as administrators do: what has no end and is unknown to the controller took no time at all."""
        said = self.call("sacctmgr", "-i", "show", "runawayjobs")
        assert "Runaway jobs are" in said, said

    def step_daemons(self) -> list[int]:
        """Return the pids of the slurmstepd processes of this cluster: those that were started with its SLURM_CONF."""
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdigit() and (path / "comm").read_text().strip() == "slurmstepd":
                    spool = f"{self.root}/".encode()
                    if spool in (path / "environ").read_bytes() + (path / "cmdline").read_bytes():
                        found.append(int(path.name))
        return found

    def node_state(self) -> str:
        """Return the node's state as sinfo says it."""
        return self.call("sinfo", "-h", "-o", "%T").strip()

    # Commands.

    def call(self, *command: str, timeout: float = 60, text: str | None = None) -> str:
        """Run one command with this cluster's configuration and return what it printed."""
        done = subprocess.run(
            command, env=self.environment, input=text, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def answers(self, *command: str) -> bool:
        """Whether a command succeeds."""
        try:
            done = subprocess.run(command, env=self.environment, capture_output=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _daemon(self, program: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        with (self.root / f"{program}.out").open("ab") as out:
            self.daemons[program] = subprocess.Popen(
                [*prefix, program, *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                cwd="/", start_new_session=True,
            )  # fmt: skip

    def _until(self, words: str, condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
        until = time.monotonic() + seconds
        while not condition():
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    out = (self.root / f"{name}.out").read_text(errors="replace")[-2000:]
                    raise AssertionError(f"{name} ended with {daemon.returncode} before {words}: {out}")
            assert time.monotonic() < until, f"expected within {seconds:g} s that {words}"
            time.sleep(0.1)


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """Give a cluster that runs."""
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
