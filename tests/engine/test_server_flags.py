"""Flags of the server that change its address or what all requests get: real processes and sockets."""

from __future__ import annotations

import json
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from argosy_engine.api.endpoints.exchange import apply_flags
from argosy_engine.api.server_args import ServerArgs
from argosy_protocol.openai import CompletionRequest
from loopback_certificate import issue_certificate
from processes import Server, free_port, running, wait_until

PREFIX = "/models/tiny"
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if enable_thinking is false %}[quick]{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return issue_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]
) -> Iterator[tuple[Server, Path]]:
    """A server on a Unix domain socket, with a key of vLLM's variable."""
    folder = tmp_path_factory.mktemp("flags")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    socket = folder / "engine.sock"
    arguments = ["argosy_engine.api.serve", "builtin://tiny", "--served-model-name", "tiny", "alias"]
    arguments += ["--threads", "1", "--uds", str(socket), "--root-path", PREFIX]
    arguments += [
        "--chat-template",
        str(template),
        "--default-chat-template-kwargs",
        '{"enable_thinking": false}',
    ]
    arguments += ["--override-generation-config", '{"temperature": 0, "max_new_tokens": 5}']
    arguments += ["--enable-force-include-usage", "--return-tokens-as-token-ids", "--enable-log-requests"]
    arguments += ["--enable-request-id-headers", "--allowed-origins", '["https://chat.example"]']
    with starting(arguments, folder / "log", socket) as up:
        yield up, socket


def starting(arguments: list[str], log: Path, socket: Path) -> Any:
    return running(
        arguments,
        log,
        port=0,
        env={"VLLM_API_KEY": "k"},
        is_ready=lambda: (
            socket.exists() and answers(httpx.HTTPTransport(uds=str(socket)), "http://engine/ready")
        ),
    )


def answers(transport: httpx.BaseTransport, url: str) -> bool:
    try:
        with httpx.Client(transport=transport, timeout=5) as client:
            return client.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def http(server: tuple[Server, Path]) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(server[1]))
    with httpx.Client(
        transport=transport, base_url="http://engine", headers={"authorization": "Bearer k"}, timeout=60
    ) as client:
        yield client


def answer(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_the_key_of_vllm_s_variable_is_required(http: httpx.Client) -> None:
    for path in ("/v1/models", f"{PREFIX}/v1/models", f"{PREFIX}/sleep", f"{PREFIX}//sleep"):
        assert http.get(path, headers={"authorization": "Bearer no"}).status_code == 401, path
    assert [card["id"] for card in answer(http.get("/v1/models"))["data"]] == ["tiny", "alias"]


def test_a_prefix_is_removed_and_may_be_stripped_by_the_proxy(http: httpx.Client) -> None:
    assert http.get(f"{PREFIX}/health").status_code == 200
    assert http.get("/health").status_code == 200
    assert http.get(f"{PREFIX}/is_sleeping").json() == {"is_sleeping": False}
    assert http.get(f"{PREFIX}{PREFIX}/health").status_code == 404


def test_the_flags_template_and_its_arguments_replace_the_model_s(http: httpx.Client) -> None:
    def prompt(**fields: Any) -> str:
        tokens = answer(http.post("/tokenize", json={"messages": HELLO, **fields}))["tokens"]
        return str(answer(http.post("/detokenize", json={"tokens": tokens}))["prompt"])

    assert prompt() == "[user]Hello[quick]"
    assert prompt(chat_template_kwargs={"enable_thinking": True}) == "[user]Hello"
    assert prompt(chat_template_kwargs={"enable_thinking": None}) == "[user]Hello[quick]"
    assert prompt(reasoning_effort="high") == "[user]Hello"


def test_max_new_tokens_of_the_flag_bounds_every_request(http: httpx.Client) -> None:
    for fields in ({}, {"max_tokens": 50}):
        body = {"messages": HELLO, "ignore_eos": True, **fields}
        usage = answer(http.post("/v1/chat/completions", json=body))["usage"]
        assert usage["completion_tokens"] == 5
    short = answer(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "ignore_eos": True}))
    assert short["usage"]["completion_tokens"] == 2


def test_a_default_number_of_tokens_ends_at_the_context(http: httpx.Client) -> None:
    limit = answer(http.get("/v1/models"))["data"][0]["max_model_len"]
    ids = [5] * (limit - 3)
    for fields in ({}, {"truncate_prompt_tokens": -1, "prompt": [5] * (2 * limit)}):
        body = {"prompt": ids, "ignore_eos": True, **fields}
        usage = answer(http.post("/v1/completions", json=body))["usage"]
        assert usage["total_tokens"] == limit
    refused = http.post("/v1/completions", json={"prompt": ids, "max_tokens": 4})
    assert refused.status_code == 400
    assert "4 for the output exceed it; ask for at most 3 here" in refused.json()["error"]["message"]


def test_every_event_has_the_usage(http: httpx.Client) -> None:
    body = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True, "stream": True, "stream_options": {}}
    events = [line[6:] for line in http.post("/v1/completions", json=body).text.splitlines() if line]
    assert events.pop() == "[DONE]"
    usages = [json.loads(event)["usage"] for event in events]
    assert all(usages)
    assert usages[-1]["completion_tokens"] == 3


def test_tokens_are_named_by_id_unless_a_request_says_otherwise(http: httpx.Client) -> None:
    def tokens(**fields: Any) -> list[str]:
        body = {"prompt": "Once", "max_tokens": 2, "ignore_eos": True, "logprobs": 0, **fields}
        return list(answer(http.post("/v1/completions", json=body))["choices"][0]["logprobs"]["tokens"])

    assert all(token.startswith("token_id:") for token in tokens())
    assert not any(token.startswith("token_id:") for token in tokens(return_tokens_as_token_ids=False))


def test_every_response_has_a_request_id(http: httpx.Client) -> None:
    assert len(http.get("/health").headers["x-request-id"]) == 32
    assert http.get("/nope", headers={"x-request-id": "mine"}).headers.get_list("x-request-id") == ["mine"]
    assert len(http.get("/health", headers={"x-request-id": "not one"}).headers["x-request-id"]) == 32
    body = {"prompt": "Once", "max_tokens": 1}
    answered = http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert answered.headers.get_list("x-request-id") == ["mine"]


def test_pages_of_an_allowed_origin_may_stream(http: httpx.Client) -> None:
    page = {"origin": "https://chat.example"}
    asks = {**page, "access-control-request-method": "POST", "authorization": ""}
    assert http.options(f"{PREFIX}/v1/completions", headers=asks).status_code == 200
    body = {"prompt": "Once", "max_tokens": 3, "stream": True}
    for key, status in (("Bearer k", 200), ("Bearer no", 401)):
        answered = http.post("/v1/completions", json=body, headers={**page, "authorization": key})
        assert answered.status_code == status
        assert answered.headers["access-control-allow-origin"] == "https://chat.example"
        assert answered.headers["vary"] == "Origin"


def test_requests_are_logged_without_their_texts(http: httpx.Client, server: tuple[Server, Path]) -> None:
    body = {"prompt": "secret words", "max_tokens": 3, "stop": "hidden", "user": "somebody"}
    answer(http.post("/v1/completions", json=body, headers={"x-request-id": "logged-1"}))
    log = server[0].log.read_text()
    (line,) = [line for line in log.splitlines() if "Received request logged-1:" in line]
    assert "max_tokens=3" in line
    assert not [word for word in ("secret", "hidden", "somebody") if word in log]


def test_flags_that_are_not_given_leave_a_request_as_it_is() -> None:
    request = CompletionRequest(prompt="a")
    apply_flags(ServerArgs(), request)
    assert request == CompletionRequest(prompt="a")


def test_messages_and_embeddings_are_logged_too(http: httpx.Client, server: tuple[Server, Path]) -> None:
    message = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "secret words"}]}
    answer(http.post("/v1/messages", json=message, headers={"x-request-id": "logged-2"}))
    http.post(
        "/v1/embeddings", json={"input": "secret", "dimensions": 4}, headers={"x-request-id": "logged-3"}
    )
    log = server[0].log.read_text()
    for request_id, number in (("logged-2", "max_tokens=3"), ("logged-3", "dimensions=4")):
        (line,) = [line for line in log.splitlines() if f"Received request {request_id}:" in line]
        assert number in line
    assert "secret" not in log


def test_https_with_a_renewed_certificate_until_the_drain_times_out(
    tmp_path: Path, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    chain, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    chain.write_bytes(certificate[0].read_bytes())
    key.write_bytes(certificate[1].read_bytes())
    port = free_port()
    url = f"https://127.0.0.1:{port}"

    def is_trusted(authority: Path) -> bool:
        context = ssl.create_default_context(cafile=str(authority))
        return answers(httpx.HTTPTransport(verify=context), f"{url}/ready")

    arguments = ["argosy_engine.api.serve", "builtin://tiny", "--threads", "1", "--port", str(port)]
    arguments += ["--ssl-certfile", str(chain), "--ssl-keyfile", str(key), "--enable-ssl-refresh"]
    arguments += ["--shutdown-timeout", "0.2"]
    with running(
        arguments, tmp_path / "log", port=port, is_ready=lambda: is_trusted(certificate[0])
    ) as server:
        body = {"prompt": "Once", "max_tokens": 3, "stream": True}
        context = ssl.create_default_context(cafile=str(certificate[0]))
        assert httpx.post(f"{url}/v1/completions", json=body, verify=context).text.endswith("[DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health")
        renewed = issue_certificate(tmp_path_factory.mktemp("renewed"))
        key.write_bytes(renewed[1].read_bytes())
        chain.write_bytes(renewed[0].read_bytes())
        wait_until(lambda: is_trusted(renewed[0]), "the renewed certificate")
        context = ssl.create_default_context(cafile=str(renewed[0]))
        forever = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=forever, verify=context, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line.startswith("data: ")]
        assert json.loads(events[-2][6:])["error"]["type"] == "service_unavailable"
        assert server.process.wait(30) == 0
