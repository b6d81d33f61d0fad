"""Which modules of the router are compiled, and what they must not contain."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_router import ROUTER, modules

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_DOES_NOT_SUSPEND = {"asyncio.timeout", "asyncio.timeout_at"}
"""Asynchronous context managers that end without suspending their task."""


def suspensions(source: str) -> list[int]:
    """Return the lines on which a coroutine may be suspended while it handles an exception.

    A compiled coroutine that is suspended inside `except` or `finally` leaves its exception as the current one of the
    thread: other tasks then see it as the context of their own, or raise it anew.
    """
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Try | ast.TryStar):
            for block in (*(handler.body for handler in node.handlers), node.finalbody):
                lines.update(line for statement in block for line in awaits(statement))
        elif isinstance(node, ast.AsyncWith):
            lines.update(node.lineno for item in node.items if not ends_at_once(item.context_expr))
    return sorted(lines)


def awaits(node: ast.AST) -> Iterator[int]:
    """Lines of a statement on which its function may be suspended, those of inner functions left out."""
    if isinstance(node, _FUNCTIONS):
        return
    if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
        yield node.lineno
    elif isinstance(node, ast.comprehension) and node.is_async:
        yield node.target.lineno
    for child in ast.iter_child_nodes(node):
        yield from awaits(child)


def ends_at_once(context: ast.expr) -> bool:
    """Whether leaving the context awaits nothing: an exception in its block is handled by `__aexit__`."""
    return isinstance(context, ast.Call) and ast.unparse(context.func) in _DOES_NOT_SUSPEND


def test_no_compiled_module_awaits_while_it_handles_an_exception() -> None:
    found = {str(path): suspensions((ROUTER.parent / path).read_text("utf-8")) for path in modules(ROUTER)}
    assert len(found) > 20
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "block",
    [
        "try:\n        g()\n    except E:\n        await g()",
        "try:\n        g()\n    except* E:\n        await g()",
        "try:\n        g()\n    finally:\n        await g()",
        "try:\n        g()\n    except E:\n        if h:\n            return [await g()]",
        "try:\n        g()\n    except E:\n        async for x in h: pass",
        "try:\n        g()\n    except E:\n        x = [y async for y in h]",
        "try:\n        g()\n    except E:\n        async with asyncio.timeout(1): pass",
        "async with asyncio.TaskGroup(), asyncio.timeout(1):\n        pass",
    ],
)
def test_the_rule_sees_what_it_forbids(block: str) -> None:
    assert len(suspensions(f"async def f():\n    {block}\n")) == 1


@pytest.mark.parametrize(
    "block",
    [
        "try:\n        await g()\n    except E:\n        pass\n    else:\n        await g()",
        "try:\n        g()\n    except E:\n        async def h():\n            await g()",
        "async with asyncio.timeout(1):\n        await g()",
    ],
)
def test_the_rule_allows_the_rest(block: str) -> None:
    assert suspensions(f"async def f():\n    {block}\n") == []


def test_every_module_is_compiled_unless_it_or_its_package_says_why_not(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "room" / "inner").mkdir(parents=True)
    (package / "shop").mkdir()
    for name in ("__init__", "a", "room/inner/__init__", "room/inner/b", "shop/__init__", "shop/d"):
        (package / f"{name}.py").write_text("x = 1\n")
    (package / "room" / "__init__.py").write_text('"""A room."""\n\n# Not compiled: nobody waits for it.\n')
    (package / "c.py").write_text('"""C."""\n\n# Not compiled: it has no loops.\n')
    (package / "e.py").write_text("# Not compiled:\n")
    assert [str(path) for path in modules(package)] == ["package/a.py", "package/e.py", "package/shop/d.py"]
