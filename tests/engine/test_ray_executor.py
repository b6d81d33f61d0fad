"""Ray executor: workers that are actors, on two nodes of a cluster or on a private Ray, and how they end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argosy_engine import LLM, EngineArgs, SamplingParams, StructuredOutputsParams
from argosy_engine.core.proc.core_client import InprocClient, SyncMPClient
from argosy_engine.errors import ConfigError, EngineDead, UtilityFailed
from argosy_engine.executor.factory import make_executor
from argosy_engine.executor.ray_executor import RayCluster, RayExecutor, take_answers
from argosy_engine.executor.ray_worker import WorkerPlace, order_ranks, spanning_groups, threads_per_worker
from argosy_engine.frontend.output_processor import RequestOutput
from argosy_engine.messages import CollectiveRpc, SchedulerOutput
from argosy_engine.sizing import resources
from engine_processes import worker_path
from listening import listening_addresses
from processes import children, descendants, held_files, is_alive, wait_until
from virtual_nodes import VirtualNodes, kill, virtual_nodes

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "num_gpu_blocks_override": 64,
    "max_model_len": 160,
}
RAY: dict[str, Any] = {**FLAGS, "distributed_executor_backend": "ray"}
SCRIPTED: dict[str, Any] = {**RAY, "model": "builtin://tiny", "worker_cls": "probe_worker.ScriptedWorker"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
STORY = "Once upon a time there was a small ship, and it sailed far out to the north where the ice is."
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
PATIENCE_S = 240.0
"""For what passes through several of Ray's processes, on a busy machine."""

pytestmark = pytest.mark.timeout(600)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **fields})


REQUESTS = [
    (STORY, params(ignore_eos=True, max_tokens=40)),
    ("Tell me about the sea", params(temperature=1.0, seed=3, top_p=0.9, logprobs=2)),
    ("A person, as JSON:", params(structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=60)),
    ("Yes or no?", params(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualNodes]:
    with worker_path(), virtual_nodes(2) as made:
        yield made


@pytest.fixture
def nodes(cluster: VirtualNodes) -> VirtualNodes:
    """Two nodes, also if a test before has killed one."""
    cluster.fill(2)
    return cluster


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@contextmanager
def running(**flags: Any) -> Iterator[RayExecutor]:
    executor = RayExecutor(EngineArgs.of(**{**SCRIPTED, **flags}))
    try:
        executor.start()
        yield executor
    finally:
        executor.shutdown()


def step(script: str) -> SchedulerOutput:
    return SchedulerOutput([], {}, {}, 0, [script], {})


def outcome(llm: LLM) -> list[RequestOutput]:
    """Generate for all requests, then the same from the prefix cache and beside one that is aborted."""
    prompts, wanted = [prompt for prompt, _ in REQUESTS], [each for _, each in REQUESTS]
    first = llm.generate(prompts, wanted, use_tqdm=False)
    engine = llm.engine
    engine.add_request("stays", *REQUESTS[0])
    engine.add_request("leaves", *REQUESTS[0])
    for _ in range(3):
        engine.step()
    engine.abort_request("leaves")
    finished: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    return [*first, *finished]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(output.error is None for output in outputs)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    with LLM("builtin://tiny", **FLAGS) as one:
        found = outcome(one)
    assert found[-1].num_cached_tokens, "the prefix cache is not used"
    return found


def test_tensor_ranks_on_two_nodes_give_the_tokens_of_one_process_until_one_is_killed(
    nodes: VirtualNodes, expected: list[RequestOutput]
) -> None:
    import ray
    from ray.experimental import internal_kv

    flags = {"tensor_parallel_size": 2, "worker_cls": "probe_worker.ProbeWorker"}
    with LLM("builtin://tiny", **RAY, **flags) as llm:
        alive = [node for node in ray.nodes() if node["Alive"]]
        assert [node["Resources"].get("CPU") for node in alive] == [1, 1], "both nodes have to be used"
        found = outcome(llm)
        assert tokens(found) == tokens(expected)
        assert found[-1].num_cached_tokens == expected[-1].num_cached_tokens
        assert internal_kv.internal_kv_get_gcs_client().internal_kv_keys(b"ActorClass", b"fun") == [], (
            "a class was sent by pickle"
        )
        pids = [pid for pid, *_ in llm.collective_rpc("echo")]
        for rank, pid in enumerate(pids):
            check_name_and_description(rank, pid)
        llm.engine.add_request("never", STORY, params(ignore_eos=True, max_tokens=100))
        llm.engine.step()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(
            EngineDead, match=rf"^Worker_TP1 \(process {pids[1]} on 127.0.0.1\) ended: Ray: The actor"
        ):
            step_for_ever(llm)
    wait_until(lambda: not any(map(is_alive, pids)), "workers to end")
    assert not ray.is_initialized()


def check_name_and_description(rank: int, pid: int) -> None:
    """Check that a worker has the name that it has with other executors, and describes itself in its log."""
    assert Path(f"/proc/{pid}/comm").read_text() == f"Worker_TP{rank}\n"
    (log,) = {Path(path) for path in held_files(pid) if path.endswith(f"-{pid}.err")}
    os.kill(pid, signal.SIGUSR1)
    last = f"argosy engine worker, process {pid}: Worker_TP{rank}, rank {rank} of 2; its stacks"
    wait_until(lambda: last in log.read_text(), "the description", PATIENCE_S)


def step_for_ever(llm: LLM) -> None:
    while True:
        llm.engine.step()


def test_what_the_cluster_cannot_place_is_refused(nodes: VirtualNodes) -> None:
    looking = RayCluster(1, 0)
    try:  # the places of an earlier test's workers are free some time after their end
        wait_until(lambda: " and 2 CPUs of these are free" in looking.describe_nodes(), "two free CPUs")
    finally:
        looking.close()
    args = EngineArgs.of(**SCRIPTED, tensor_parallel_size=4)
    executor = RayExecutor(args, placement_timeout=0.5)
    try:
        with pytest.raises(
            ConfigError,
            match=r"Ray has not placed 4 workers with 1 CPU each within 0.5 s: 127.0.0.1 has 0 GPUs and 1 CPUs; "
            r"127.0.0.1 has 0 GPUs and 1 CPUs; 0 GPUs and 2 CPUs of these are free; add nodes, .*smaller",
        ):
            executor.start()
    finally:
        executor.shutdown()


def test_engines_of_one_program_share_the_connection_to_a_cluster(nodes: VirtualNodes) -> None:
    import ray

    first, second = (RayCluster(1, 0) for _ in range(2))
    first.close()
    first.close()
    assert second.node_id
    second.close()
    assert not ray.is_initialized()


def test_a_ray_that_ends_the_thread_which_waits_for_answers_is_a_reason() -> None:
    def end() -> None:
        raise SystemExit(0)

    answers = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=end))
    assert take_answers(SimpleNamespace(answers=answers), lambda _: None) == "Ray: it has ended"


def test_a_step_that_fails_on_a_worker_which_is_not_awaited_ends_the_engine_for_its_reason(
    nodes: VirtualNodes, pipe: Path
) -> None:
    with running(tensor_parallel_size=2) as executor:
        pids = [pid for pid, *_ in executor.collective_rpc(CollectiveRpc("echo"))]
        executor.execute(step("end:fail:1"))
        never = executor.execute(step(f"end:open:{pipe}"))
        with pytest.raises(
            EngineDead, match=rf"^Worker_TP1 \(process {pids[1]} on .*\) failed: RuntimeError: as asked$"
        ):
            never.get()
    wait_until(lambda: not any(map(is_alive, pids)), "workers to end")


def test_pipeline_stages_on_two_nodes_give_the_tokens_of_one_process_until_a_node_ends(
    nodes: VirtualNodes, expected: list[RequestOutput], pipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM(
        "builtin://tiny", **RAY, worker_cls="probe_worker.ScriptedWorker", pipeline_parallel_size=2
    ) as llm:
        assert tokens(outcome(llm)) == tokens(expected)
        check_log_of_workers(capfd)
        assert isinstance(llm.client, InprocClient)
        executor = llm.client.core.executor
        pids = [pid for pid, *_ in executor.collective_rpc(CollectiveRpc("echo"))]
        never = executor.execute(step(f"end:open:{pipe}"))
        nodes.kill()
        reason = rf"^Worker_PP1 \(process {pids[1]} on 127.0.0.1\) ended: Ray: The actor "
        for call in (never.get, executor.check_health, lambda: executor.execute(step("end:nothing:"))):
            with pytest.raises(EngineDead, match=reason):
                call()
    wait_until(lambda: not any(map(is_alive, pids)), "workers to end")


def check_log_of_workers(capfd: pytest.CaptureFixture[str]) -> None:
    """Check what Ray prints here of the workers' logs: the first one's lines, once and without colors."""
    log = ""

    def has_arrived() -> bool:
        nonlocal log
        log += capfd.readouterr().err
        return "attention backend" in log

    wait_until(has_arrived, "the workers' lines", PATIENCE_S)
    (line,) = [line for line in log.splitlines() if "attention backend" in line]
    assert " INFO [Worker_PP0] argosy_engine.worker.worker " in line
    assert "\x1b" not in line


def test_a_private_ray_is_closed_to_others_and_ends_with_a_killed_engine(
    no_cluster: None, bare_workers: None
) -> None:
    with LLM("builtin://tiny", **RAY, multiprocess=True) as llm:
        assert len(llm.generate("Hello", params(), use_tqdm=False)) == 1
        assert isinstance(llm.client, SyncMPClient)
        core = llm.client.pid
        (keeper,) = [
            pid for pid in children(core) if b"private_ray" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        started = [keeper, *descendants(keeper)]
        assert listening_addresses([core, *started]) <= LOOPBACK
        assert len(token(keeper)) == 64
        (log_directory,) = {
            path for pid in started for path in held_files(pid) if path.endswith("gcs_server.out")
        }
        directory = next(path for path in Path(log_directory).parents if path.name.startswith("argosy-"))
        assert directory.stat().st_mode & 0o777 == 0o700
        os.kill(core, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, started)), "Ray to end")
        assert not directory.exists()
        with pytest.raises(EngineDead):
            llm.generate("Hello", use_tqdm=False)


@pytest.mark.full  # `make test` kills the central process of a private Ray, and an engine that has one
def test_the_end_of_the_keeper_of_a_private_ray_ends_the_engine_but_not_its_program(
    no_cluster: None, bare_workers: None
) -> None:
    before = set(descendants(os.getpid()))
    with running() as executor:
        started = set(descendants(os.getpid())) - before
        kill_ray(executor, started, "private_ray")
    check_ended(executor)
    kill(list(started))  # some of what the keeper started would take a minute to notice its end
    wait_until(lambda: not any(map(is_alive, started)), "Ray to end")


def kill_ray(executor: RayExecutor, started: set[int], victim: str) -> None:
    """Kill one of a private Ray's processes, and check that the engine says so."""
    os.kill(next(pid for pid in started if runs(pid, victim)), signal.SIGKILL)
    wait_until(lambda: is_dead(executor), "the end to be noticed")
    for call in (executor.check_health, lambda: executor.execute(step("end:nothing:"))):
        with pytest.raises(EngineDead, match=r"^the engine's private Ray ended"):
            call()


def check_ended(executor: RayExecutor) -> None:
    import ray

    with pytest.raises(Exception, match="Ray has not been started yet"):
        ray.put(b"of a thread that has not heard of the end")
    assert not ray.is_initialized()
    with pytest.raises(EngineDead):
        executor.check_health()


def test_a_private_ray_runs_the_steps_of_one_engine_of_a_program_until_its_central_process_is_killed(
    no_cluster: None, bare_workers: None, pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the path of TMPDIR is too long for Ray's sockets."""
    import ray

    directory = tmp_path / ("long" * 20)
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    before = set(descendants(os.getpid()))
    with running(tensor_parallel_size=2) as executor:
        assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")
        with pytest.raises(
            ConfigError, match=r"^another engine of this program has a private Ray, .*`ray start"
        ):
            RayCluster(1, 0)
        check_order(executor, pipe, tmp_path / "launched")
        started = set(descendants(os.getpid())) - before
        kill_ray(executor, started, "gcs_server")
    check_ended(executor)
    wait_until(lambda: not any(map(is_alive, started)), "Ray to end")


def check_order(executor: RayExecutor, pipe: Path, launched: Path) -> None:
    """Check that steps overlap, and that answers keep the order of the calls."""
    os.mkfifo(launched)
    with ExitStack() as opened:
        first = executor.execute(step(f"end:open:{pipe}"))
        second = executor.execute(step(f"launch:tell:{launched}"))
        opened.enter_context(launched.open("rb"))  # waits until a worker has launched the second
        with ThreadPoolExecutor(1) as thread:
            called = thread.submit(executor.collective_rpc, CollectiveRpc("place", kwargs={"base": 2}))
            opened.enter_context(pipe.open("r+b", buffering=0))  # only now the first may end
            assert called.result() == [[2, 2], [3, 2]]
        assert first.get().request_ids == ["open"]
        assert second.get().request_ids == ["tell"]
    with pytest.raises(UtilityFailed, match=r"fail failed in worker 0: RuntimeError: as asked"):
        executor.collective_rpc(CollectiveRpc("fail"))
    executor.check_health()


def is_dead(executor: RayExecutor) -> bool:
    try:
        executor.check_health()
    except EngineDead:
        return True
    return False


def runs(pid: int, program: str) -> bool:
    """Whether a process runs a program or a Python module of that name."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return any(argument.endswith(program) for argument in arguments)


def token(pid: int) -> str:
    """The token that a process shows to Ray, and asks for."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)
    assert found[b"RAY_AUTH_MODE"] == b"token"
    return found[b"RAY_AUTH_TOKEN"].decode()


def test_a_start_that_fails_leaves_no_private_ray(no_cluster: None, bare_workers: None) -> None:
    before = set(descendants(os.getpid()))
    flags = {"tensor_parallel_size": 2, "worker_cls": "probe_worker.FailsLateWorker"}
    with pytest.raises(ConfigError, match=r"^as asked$"):
        LLM("builtin://tiny", **RAY, **flags)
    assert not set(descendants(os.getpid())) - before
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("argosy_engine.executor.ray_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray needs the package 'ray': `pip install '.\[ray\]'`"):
        make_executor(EngineArgs.of(**RAY, model="builtin://tiny"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://127.0.0.1:10001", "is for Ray Client, .*by pickle.*RAY_ADDRESS=auto or HOST:PORT"),
        ("nowhere", "cannot join the Ray cluster at nowhere: .*; this machine has to be one of its nodes"),
    ],
)
def test_an_address_that_cannot_be_joined_is_refused(
    address: str, message: str, no_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=message):
        make_executor(EngineArgs.of(**RAY, model="builtin://tiny"))


@pytest.mark.parametrize(
    ("nodes", "tensor", "ranks", "spanning"),
    [
        ("aabb", 2, "aabb", []),
        ("bbaa", 2, "aabb", []),
        ("abab", 2, "aabb", []),
        ("bab", 1, "abb", []),
        ("aaabbb", 2, "aabbab", [[4, 5]]),
        ("abbbbccc", 4, "bbbbaccc", [[4, 5, 6, 7]]),
        ("bc", 2, "bc", [[0, 1]]),
    ],
)
def test_ranks_that_share_layers_are_neighbours(
    nodes: str, tensor: int, ranks: str, spanning: list[list[int]]
) -> None:
    order = order_ranks(nodes, driver="a", tensor=tensor)
    assert sorted(order) == list(range(len(nodes)))
    assert "".join(nodes[index] for index in order) == ranks
    assert spanning_groups(ranks, tensor) == spanning


def test_workers_on_one_machine_share_its_cores() -> None:
    places = [WorkerPlace(node, host, 1, 1, 8, "") for node, host in ("ax", "bx", "cx", "dy")]
    assert threads_per_worker(places) == [2, 2, 2, 8]


def test_the_gpus_of_a_cluster_are_not_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "visible_gpus", lambda: ["0"])
    args = EngineArgs.of(**{**RAY, "device": "cuda"}, model="builtin://tiny", tensor_parallel_size=2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="needs 2 GPUs, one for each worker, and 1 are visible"):
        resources.check_gpus(args)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert resources.check_gpus(args) == []
