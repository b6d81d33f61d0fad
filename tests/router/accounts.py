"""Accounts of API keys, for tests without a key file."""

from __future__ import annotations

from typing import Any

from argosy_router.auth.accounts import Account
from argosy_router.auth.key_terms import KeyTerms


def account(name: str = "a", **terms: Any) -> Account:
    return Account(KeyTerms(name=name, **terms), 0.0)
