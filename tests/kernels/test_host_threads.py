"""The number of threads, and a pool that survives forks and callers at the same time."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from hyper_parallel.kernels import host
from hyper_parallel.kernels.host import cgroups, threads
from tests.kernels.host_inputs import normal, running
from tests.ranks import run_ranks


@pytest.fixture
def eight_cpus(monkeypatch):
    monkeypatch.delenv("HYPER_PARALLEL_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(threads, "_affinity_cpus", lambda: cpus(8))
    monkeypatch.setattr(threads, "launcher_cpus", lambda proc, pid: cpus(8))
    monkeypatch.setattr(threads, "cgroup_cpus", lambda root, own: float("inf"))
    monkeypatch.setattr(threads, "cgroup_cpuset", lambda root, own: None)


def cpus(number, first=0):
    return frozenset(range(first, first + number))


@pytest.mark.usefixtures("eight_cpus")
class TestNumThreads:
    def test_is_all_cpus_of_the_affinity_mask(self):
        assert host.num_threads() == 8

    def test_is_this_ranks_share(self, monkeypatch):
        for num_ranks, expected in ((1, 8), (2, 4), (3, 2), (8, 1), (16, 1)):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
            assert host.num_threads() == expected

    def test_respects_the_quota_before_it_is_shared(self, monkeypatch):
        monkeypatch.setattr(threads, "cgroup_cpus", lambda root, own: 5.5)
        assert host.num_threads() == 5
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert host.num_threads() == 2

    @pytest.mark.parametrize(
        ("own", "launcher", "cpuset", "expected"),
        [
            pytest.param(cpus(24, 48), cpus(192), None, 24, id="cpus-of-its-own"),
            pytest.param(cpus(4, 48), cpus(192), None, 4, id="few-cpus-of-its-own"),
            pytest.param(cpus(48, 48), cpus(96), None, 12, id="a-node-shared-by-four"),
            pytest.param(cpus(16), cpus(16), None, 2, id="taskset-before-the-launcher"),
            pytest.param(cpus(32), cpus(128), cpus(32), 4, id="launcher-outside-the-cpuset"),
            pytest.param(cpus(24, 48), cpus(2), cpus(192), 24, id="launcher-pinned-elsewhere"),
            pytest.param(cpus(16), None, None, 2, id="launcher-unknown"),
        ],
    )
    def test_of_one_of_eight_ranks_is(self, monkeypatch, own, launcher, cpuset, expected):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        monkeypatch.setattr(threads, "_affinity_cpus", lambda: own)
        monkeypatch.setattr(threads, "launcher_cpus", lambda proc, pid: launcher)
        monkeypatch.setattr(threads, "cgroup_cpuset", lambda root, own: cpuset)
        assert host.num_threads() == expected

    def test_is_what_the_variable_says(self, monkeypatch):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("HYPER_PARALLEL_NUM_THREADS", "6")
        assert host.num_threads() == 6

    @pytest.mark.parametrize("name", ["HYPER_PARALLEL_NUM_THREADS", "LOCAL_WORLD_SIZE"])
    @pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
    def test_of_a_bad_variable_is_an_error_that_names_it(self, monkeypatch, name, text):
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=f"{name} to be 1 or more, got '{text}'"):
            host.num_threads()


def test_launcher_of_a_rank_in_a_shell_that_pins_itself_is_the_one_above():
    """Real processes: a launcher, the shell that it starts as a rank, the rank in that."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("a shell cannot be pinned to fewer CPUs than one")
    run = "import os, subprocess, sys; {}; sys.exit(subprocess.call(sys.argv[1:]))"
    launcher = run.format("os.environ['LOCAL_RANK'] = '0'")  # does not show in its own environ
    shell = run.format(f"os.sched_setaffinity(0, [{allowed[0]}])")
    rank = (
        "import os, pathlib; from hyper_parallel.kernels.host.threads import launcher_cpus; "
        "print(*launcher_cpus(pathlib.Path('/proc'), os.getpid()))"
    )
    command = [arg for code in (launcher, shell, rank) for arg in (sys.executable, "-c", code)]
    environ = {name: text for name, text in os.environ.items() if name != "LOCAL_RANK"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, timeout=60)
    assert sorted(map(int, done.stdout.split())) == allowed


def test_launcher_is_the_nearest_process_that_is_no_rank(tmp_path):
    for pid, parent, mask, environ in [
        (40, 30, "4-5", b"LOCAL_RANK=1\0"),
        (30, 20, "4-5", b"PATH=/bin\0LOCAL_RANK=1\0"),  # the shell that pinned the rank
        (20, 1, "0-7,16-23", b"NOT_LOCAL_RANK=1\0"),
    ]:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "status").write_text(f"PPid:\t{parent}\nCpus_allowed_list:\t{mask}\n")
        (folder / "environ").write_bytes(environ)
    assert threads.launcher_cpus(tmp_path, 40) == cpus(8) | cpus(8, 16)
    assert threads.launcher_cpus(tmp_path, 20) is None


def test_cpuset_is_that_of_the_nearest_cgroup_that_says(tmp_path):
    inner = tmp_path / "job" / "rank"
    inner.mkdir(parents=True)
    (inner.parent / "cpuset.cpus.effective").write_text("0-3,8\n")
    (tmp_path / "cpuset.cpus.effective").write_text("0-63\n")
    (tmp_path / "own").write_text("0::/job/rank\n")
    assert cgroups.cgroup_cpuset(tmp_path, tmp_path / "own") == {0, 1, 2, 3, 8}


def test_cpuset_of_version_1(tmp_path):
    folder = tmp_path / "cpuset" / "job"
    folder.mkdir(parents=True)
    (folder / "cpuset.effective_cpus").write_text("2-3\n")
    (tmp_path / "own").write_text("3:cpuset:/job\n0::/\n")
    assert cgroups.cgroup_cpuset(tmp_path, tmp_path / "own") == {2, 3}


def test_affinity_mask_is_respected():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert threads._affinity_cpus() == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)


def test_quota_of_version_2_is_the_least_on_the_way_up(tmp_path):
    inner = tmp_path / "root" / "job" / "rank"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "own").write_text("0::/job/rank\n")
    assert cgroups.cgroup_cpus(tmp_path / "root", tmp_path / "own") == 2.5


def test_quota_of_version_1(tmp_path):
    folder = tmp_path / "root" / "cpu" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("300000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "own").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    assert cgroups.cgroup_cpus(tmp_path / "root", tmp_path / "own") == 3.0


def test_without_cgroups_there_is_no_quota(tmp_path):
    assert cgroups.cgroup_cpus(tmp_path, tmp_path / "none") == float("inf")


def num_threads_of_process():
    return len(os.listdir("/proc/self/task"))


def test_pool_survives_a_fork():
    """OpenMP's threads do not: a forked rank waits for them forever."""
    tensor = normal(1_000_000, torch.float32)
    with running(num_threads=4):
        expected = host.partial_norms([tensor], 2.0).sums_of_squares

        def rank_main(rank):
            del rank
            assert num_threads_of_process() == 1
            ours = [host.partial_norms([tensor], 2.0).sums_of_squares for _ in range(20)]
            return ours, num_threads_of_process()

        for ours, num_threads in run_ranks(rank_main, 2, backend="none", timeout_s=20):
            assert ours == [expected] * 20
            assert num_threads == 4
        assert host.partial_norms([tensor], 2.0).sums_of_squares == expected


def test_grandchildren_and_siblings_get_pools_of_their_own():
    tensor = normal(1_000_000, torch.float32)

    def rank_main(rank):
        del rank
        first = host.partial_norms([tensor], 2.0).sums_of_squares
        child = os.fork()
        if child == 0:
            os._exit(0 if host.partial_norms([tensor], 2.0).sums_of_squares == first else 1)
        assert host.partial_norms([tensor], 2.0).sums_of_squares == first
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with running(num_threads=3):
        assert run_ranks(rank_main, 2, backend="none", timeout_s=20) == [0, 0]


def test_several_threads_may_call_at_once():
    tensors = [normal(300_000, torch.float32, seed=i) for i in range(4)]
    with running(num_threads=3):
        expected = [host.partial_norms([t], 2.0).sums_of_squares for t in tensors]
        wrong = []

        def call(i):
            for _ in range(50):
                if host.partial_norms([tensors[i]], 2.0).sums_of_squares != expected[i]:
                    wrong.append(i)

        callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(timeout=30)
        assert not any(caller.is_alive() for caller in callers)
    assert wrong == []
