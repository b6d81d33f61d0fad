"""How the nodes of an engine find each other: who may join, who is refused and why, what happens when one is lost."""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from argosy_engine import EngineArgs
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.executor import multinode_executor, node_agent
from argosy_engine.executor import multinode_executor as node_group
from argosy_engine.executor.broadcast import MessageStream
from argosy_engine.executor.factory import make_executor
from argosy_engine.executor.multinode_executor import (
    HANDSHAKE_TIMEOUT_S,
    MAX_REFUSAL_LINES,
    HandshakeSlots,
    NodeGroup,
    RefusalLog,
)
from argosy_engine.executor.node_agent import JoiningNode
from argosy_engine.executor.node_channel import (
    ANSWER,
    ENDED,
    MESSAGE,
    PROGRESS,
    READY,
    START,
    STOP,
    NodeChannel,
    NodeHello,
    NodeStart,
    WorkerExit,
    connect_to_peer,
    hello,
    read_keys,
)
from argosy_engine.messages import LoadStep
from processes import free_port, wait_until

KEY = b"k" * 32
OLD = b"o" * 32


def arguments(**fields: Any) -> EngineArgs:
    return EngineArgs.of(
        **{
            "model": "builtin://tiny",
            "device": "cpu",
            "tensor_parallel_size": 2,
            "nnodes": 2,
            "distributed_timeout_seconds": 60,
            **fields,
        }
    )


class Group:
    """Machine 0 of an engine, and what its executor reads of the other machines' workers."""

    def __init__(self, keys: tuple[bytes, ...] = (KEY,), **fields: Any) -> None:
        self.args = arguments(master_port=free_port(), **fields)
        config = self.args.parallel_config
        far = range(config.local_workers, config.world_size)
        pairs = {rank: socket.socketpair() for rank in far}
        self._sockets = [ours for ours, _ in pairs.values()]
        self._channels: list[NodeChannel] = []
        self.answers = {rank: MessageStream(ours) for rank, (ours, _) in pairs.items()}
        self.steps: list[str] = []
        """Phases of the load, as they are told."""
        self.group = NodeGroup(
            self.args, keys, {rank: theirs for rank, (_, theirs) in pairs.items()}, self._note
        )

    def _note(self, step: LoadStep) -> None:
        msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=LoadStep)  # within its bounds
        self.steps.append(step.phase)

    def joining(self, rank: int = 1, keys: tuple[bytes, ...] = (KEY,), **fields: Any) -> JoiningNode:
        made = JoiningNode(msgspec.structs.replace(self.args, node_rank=rank, **fields), keys)
        made.begin_deadline()
        return made

    def join(self, rank: int = 1, keys: tuple[bytes, ...] = (KEY,), **fields: Any) -> NodeChannel:
        self._channels.append(self.joining(rank, keys, **fields).join())
        return self._channels[-1]

    def close(self) -> None:
        for channel in self._channels:
            channel.finish()
        self.group.close("")
        for each in (*self._channels, *self._sockets):
            each.close()


@contextmanager
def group(keys: tuple[bytes, ...] = (KEY,), **fields: Any) -> Iterator[Group]:
    made = Group(keys, **fields)
    try:
        yield made
    finally:
        made.close()


def test_answers_and_messages_pass(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "argosy.core")
    with group(tensor_parallel_size=4) as made:
        node = made.join()
        node.send(PROGRESS, b"fetching\nthe model")
        node.send(READY)
        made.group.wait_until_ready()
        assert "fetching the model" in caplog.text
        made.group.start_workers(1234)
        made.group.put(b"step")
        start = node.receive()
        assert start is not None
        assert start[:1] == START
        assert msgspec.msgpack.decode(start[1:], type=NodeStart) == NodeStart("127.0.0.1", 1234)
        assert node.receive() == MESSAGE + b"step"
        node.send(ANSWER, b"\x03\x00", b"third")
        node.send(ANSWER, b"\x02\x00", b"second")
        node.send(ENDED, msgspec.msgpack.encode(WorkerExit(3, "exit code 7")))
        assert [made.answers[rank].receive() for rank in (3, 2, 3)] == [b"third", b"second", None]
        assert made.group.describe_exit(3) == "exit code 7"
        closing = threading.Thread(target=made.group.close, args=("as asked",))
        closing.start()
        assert [node.receive(), node.receive()] == [STOP + b"as asked", None]
        node.finish()
        closing.join()
        names = {thread.name for thread in threading.enumerate()}
        assert not names & {"node", "nodes"}


def test_a_load_advances_while_machines_fetch_the_model() -> None:
    with group() as made:
        node = made.join()
        for text in ("at 1 %", "at 2 %", "at 2 %", "at 3 % " + 100 * "x"):
            node.send(PROGRESS, f"fetching the model: {text}".encode())
        node.send(READY)
        made.group.wait_until_ready()
        told = [step for step in made.steps if not step.startswith("waiting")]
        assert told[:3] == [
            "node 1: joined",
            "node 1: fetching the model: at 1 %",
            "node 1: fetching the model: at 2 %",
        ]
        assert told[3].startswith("node 1: fetching the model: at 3 % xxx")
        assert told[4:] == ["node 1: has the model"]


def test_a_load_advances_while_machines_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes with every step of the load that is told."""
    monkeypatch.setenv("ARGOSY_NODE_KEY", KEY.decode())
    monkeypatch.setattr(node_group, "WAITING_STEP_S", 0.01)
    steps: list[LoadStep] = []
    clocked = partial(NodeGroup, clock=lambda: float(len(steps)))
    monkeypatch.setattr(multinode_executor, "NodeGroup", clocked)
    args = arguments(master_port=free_port(), tensor_parallel_size=4, nnodes=4, distributed_timeout_seconds=3)
    executor = make_executor(args, on_load_step=steps.append)
    try:
        with pytest.raises(EngineDead, match=r"of 4 nodes 1, 2, 3 did not join within 3 s"):
            executor.start()
    finally:
        executor.shutdown()
    assert [step.phase for step in steps] == ["waiting for nodes 1, 2, 3"] * 3


def test_a_machine_that_is_lost_ends_its_workers() -> None:
    with group() as made:
        made.join().close()
        assert made.answers[1].receive() is None
        assert "node 1 (" in made.group.describe_exit(1)
        assert "cannot be reached" in made.group.describe_exit(1)
        with pytest.raises(EngineDead, match=r"node 1 .* ended before it was ready"):
            made.group.wait_until_ready()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_machine_cannot_answer_for_anothers_workers(rank: int) -> None:
    with group(tensor_parallel_size=3, nnodes=3) as made:
        node = made.join(1)
        node.send(ANSWER, rank.to_bytes(2, "little"), b"mine")
        assert made.answers[1].receive() is None
        assert "on another node" in made.group.describe_exit(1)
        made.join(2).close()  # its worker is not affected before
        assert "on another node" not in made.group.describe_exit(2)


@pytest.mark.parametrize(
    ("first", "joining"),
    [((OLD,), (KEY, OLD)), ((KEY, OLD), (OLD,)), ((KEY, OLD), (KEY, OLD)), ((KEY, OLD), (KEY,))],
    ids=["joins an older one", "is older", "during", "after"],
)
def test_machines_that_start_while_the_key_is_replaced_find_each_other(
    first: tuple[bytes, ...], joining: tuple[bytes, ...]
) -> None:
    with group(first) as made:
        made.join(keys=joining).send(READY)
        made.group.wait_until_ready()


def test_no_key_in_common_is_refused() -> None:
    with group((KEY, OLD)) as made, pytest.raises(ConfigError, match="another key"):
        made.join(keys=(b"x" * 32, b"y" * 32))


def test_the_variable_may_have_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGOSY_NODE_KEY", f"{KEY.decode()}\n{OLD.decode()}\n")
    assert read_keys(arguments()) == (KEY, OLD)
    for text, message in (
        (f"{KEY.decode()}\nshort", "5 bytes"),
        ("k" * 16 + ("\n" + "k" * 16) * 8, "9 keys"),
    ):
        monkeypatch.setenv("ARGOSY_NODE_KEY", text)
        with pytest.raises(ConfigError, match=message):
            read_keys(arguments())


def test_another_key_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with group() as made:
        with pytest.raises(ConfigError, match=r"another key.*--node-key-file"):
            made.join(keys=(b"x" * 32,))
        wait_until(lambda: "its key is not this engine's" in caplog.text, "the refusal to be logged")
        made.join().send(READY)
        made.group.wait_until_ready()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tensor_parallel_size": 4}, "--tensor-parallel-size is 4 on node 1 and 2 on node 0"),
        ({"model": "builtin://other"}, "the model is .*other on node 1 and .*tiny on node 0"),
        ({"block_size": 32}, "--block-size is 32 on node 1 and the default on node 0"),
        ({"device": "cuda"}, "the device is cuda on node 1 and cpu on node 0"),
        ({"node_rank": 5}, "--node-rank 5 is none of 1 to 1"),
    ],
)
def test_another_configuration_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with group() as made, pytest.raises(ConfigError, match=f"refuses this node: {reason}"):
        made.join(**{"rank": fields.pop("node_rank", 1), **fields})


@pytest.mark.parametrize("field", ["version", "torch"])
def test_another_version_is_refused_by_name(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def old(args: EngineArgs) -> NodeHello:
        return msgspec.structs.replace(hello(args), **{field: "0.0.1"})

    with group() as made:
        monkeypatch.setattr(node_agent, "hello", old)
        with pytest.raises(ConfigError, match=r"is 0.0.1 on node 1 and .* install the same version"):
            made.join()


def test_settings_of_one_machine_may_differ() -> None:
    with group() as made:
        made.join(threads=3, download_dir="/elsewhere", distributed_timeout_seconds=7).send(READY)
        made.group.wait_until_ready()


def test_a_rank_is_given_once() -> None:
    with group() as made:
        node = made.join()
        with pytest.raises(EngineDead, match="has joined already with this --node-rank"):
            made.join()
        node.send(READY)
        made.group.wait_until_ready()


def test_a_machine_that_is_lost_before_its_admission_can_join_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with group() as made:
        stream = socket.create_connection(("127.0.0.1", made.args.master_port))

        def reset(own: NodeHello, other: NodeHello) -> str | None:
            """Lose the peer after its `NodeHello`, and so before it is told whether it may join."""
            if stream.fileno() >= 0:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stream.close()
            return None

        monkeypatch.setattr(node_group, "mismatch", reset)
        channel = connect_to_peer(stream, KEY, HANDSHAKE_TIMEOUT_S)
        channel.send(msgspec.msgpack.encode(hello(msgspec.structs.replace(made.args, node_rank=1))))
        wait_until(lambda: "refused a connection of 127.0.0.1" in caplog.text, "the end of the connection")
        made.join().send(READY)
        made.group.wait_until_ready()


def test_waiting_is_bounded() -> None:
    with group(distributed_timeout_seconds=1) as made:
        with pytest.raises(EngineDead, match=r"of 2 nodes 1 did not join within 1 s at 127.0.0.1"):
            made.group.wait_until_ready()
        joining = made.joining()
    with pytest.raises(EngineDead, match=r"node 0 did not answer at .* within 1 s"):
        joining.join()


def test_a_machine_may_start_before_the_first_one() -> None:
    args = arguments(master_port=free_port(), node_rank=1)
    joining = JoiningNode(args, (KEY,))
    with ThreadPoolExecutor(1) as pool:
        joined: Future[NodeChannel] = pool.submit(joining.join)
        pair = socket.socketpair()
        made = NodeGroup(msgspec.structs.replace(args, node_rank=0), (KEY,), {1: pair[1]})
        channel = joined.result(60)
        channel.send(READY)
        made.wait_until_ready()
        channel.finish()
        made.close("")
        channel.close()
        pair[0].close()


def test_a_port_that_is_taken_is_named() -> None:
    with (
        group() as made,
        pytest.raises(ConfigError, match=r"node 0 cannot listen at 127.0.0.1:.*--master-port"),
    ):
        NodeGroup(made.args, (KEY,), {})


def test_connections_that_say_nothing_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with group() as made:
        address = ("127.0.0.1", made.args.master_port)
        silent = [socket.create_connection(address) for _ in range(8)]
        made.join().send(READY)
        made.group.wait_until_ready()
        for each in silent:
            each.close()


@contextmanager
def silent_connections(port: int, number: int, host: str) -> Iterator[None]:
    """Keep connections open that say nothing, and open a new one for each that is closed."""
    ended, selector = threading.Event(), selectors.DefaultSelector()

    def connect() -> None:
        stream = socket.create_connection(("127.0.0.1", port), source_address=(host, 0))
        selector.register(stream, selectors.EVENT_READ)

    def reconnect() -> None:
        while not ended.is_set():
            for key, _ in selector.select(0.1):
                stream = key.fileobj
                assert isinstance(stream, socket.socket)
                try:
                    is_open = bool(stream.recv(4096))
                except ConnectionError:
                    is_open = False
                if not is_open:
                    selector.unregister(stream)
                    stream.close()
                    connect()

    for _ in range(number):
        connect()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(reconnect)
        try:
            yield
        finally:
            ended.set()
            running.result()
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
            selector.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["same address", "another address"])
def test_connections_that_come_back_do_not_keep_others_out(
    host: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = logging.getLogger("argosy.core.this_group")  # another test's group may still say what it refused
    monkeypatch.setattr(node_group, "logger", own)

    def num_refusals() -> int:
        lines = [record.getMessage() for record in caplog.records if record.name == own.name]
        return sum(line.startswith("refused a connection") for line in lines)

    with group(distributed_timeout_seconds=25) as made:
        with silent_connections(made.args.master_port, 24, host):
            made.join().send(READY)
            made.group.wait_until_ready()
            wait_until(lambda: num_refusals() == MAX_REFUSAL_LINES, "ten refusals")
        assert num_refusals() == MAX_REFUSAL_LINES


def test_a_full_port_cuts_the_oldest_connection_of_the_busiest_address() -> None:
    slots = HandshakeSlots(3, 0.0)
    with ExitStack() as stack:
        pairs = {
            name: tuple(map(stack.enter_context, socket.socketpair()))
            for name in ("a1", "b1", "b2", "c1", "b3")
        }
        for name in ("a1", "b1", "b2"):
            assert slots.take(pairs[name][0], name[0])
        assert slots.take(pairs["c1"][0], "c")
        assert pairs["b1"][1].recv(1) == b""
        assert slots.take(pairs["b3"][0], "b")
        assert pairs["a1"][1].recv(1) == b""  # of three that have one each, the oldest
        slots.give_back(pairs["b1"][0])  # it has none any more
        slots.give_back(pairs["b2"][0])
        assert slots.take(pairs["a1"][0], "a")
        pairs["c1"][1].setblocking(False)
        with pytest.raises(BlockingIOError):
            pairs["c1"][1].recv(1)


def test_waiting_for_a_slot_ends_when_one_is_given_back_or_at_the_close() -> None:
    slots = HandshakeSlots(1, 3600.0)
    with (
        socket.socket() as first,
        socket.socket() as second,
        socket.socket() as third,
        ThreadPoolExecutor(1) as pool,
    ):
        assert slots.take(first, "a")
        waiting = pool.submit(slots.take, second, "b")
        slots.give_back(first)
        assert waiting.result(60)
        waiting = pool.submit(slots.take, third, "c")
        slots.close()
        assert not waiting.result(60)


def test_refusals_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = RefusalLog(logging.getLogger("argosy.core"), clock=lambda: now)
    for _ in range(25):
        refusals.warn("10.0.0.9", "its key is not this engine's")
    assert caplog.text.count("refused a connection of 10.0.0.9") == MAX_REFUSAL_LINES
    now = 60.0
    refusals.warn("10.0.0.8", "it did not answer in time")
    assert "refused 15 further connections" in caplog.text
    assert "refused a connection of 10.0.0.8" in caplog.text


def test_the_key_comes_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARGOSY_NODE_KEY", raising=False)
    file = tmp_path / "key"
    args = arguments(node_key_file=str(file))
    with pytest.raises(ConfigError, match=r"node-key-file .*No such file"):
        read_keys(args)
    for content, message in (("short", "5 bytes"), ("x" * 5000, "4097 bytes"), ("\n", "needs a key")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_keys(args)
    file.write_text("from the file, long enough\n")
    monkeypatch.setenv("ARGOSY_NODE_KEY", "from the variable, long enough")
    assert read_keys(args) == (b"from the file, long enough",)
    assert read_keys(arguments()) == (b"from the variable, long enough",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nnodes": 3}, "--nnodes 3 must divide the number of workers"),
        ({"node_rank": 2}, "--node-rank 2 needs --nnodes 3"),
        ({"nnodes": 1, "node_rank": 1}, "--node-rank 1 needs --nnodes 2"),
        ({"data_parallel_size": 2}, "needs --data-parallel-size 1"),
        ({"distributed_executor_backend": "ray"}, "needs --distributed-executor-backend mp, not ray"),
    ],
)
def test_layouts_that_are_not_supported(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(**fields)
