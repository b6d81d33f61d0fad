"""Settings from the environment."""

from __future__ import annotations

import pytest

from argosy_operator.config import ConfigError, OperatorConfig

ENV = {"POD_NAMESPACE": "n", "ARGOSY_FLEET_KEY": "0123456789abcdef", "ARGOSY_ENGINE_IMAGE": "i"}


def test_config_from_the_environment() -> None:
    config = OperatorConfig.from_env(
        {**ENV, "ARGOSY_WATCH_NAMESPACES": "a, b,", "ARGOSY_ROUTER_URL": "http://r/"}
    )
    assert (config.namespace, config.fleet_key, config.engine_image) == ("n", b"0123456789abcdef", "i")
    assert (config.watch_namespaces, config.router_url) == (("a", "b"), "http://r")
    assert not config.router_speaks_tls
    assert config.engine_upgrade_policy == "OnSpecChange"
    automatic = OperatorConfig.from_env({**ENV, "ARGOSY_ENGINE_UPGRADE_POLICY": "Automatic"})
    assert automatic.engine_upgrade_policy == "Automatic"
    assert OperatorConfig.from_env({**ENV, "ARGOSY_ROUTER_URL": "https://r"}).router_speaks_tls


def test_images_have_defaults() -> None:
    config = OperatorConfig.from_env(ENV)
    assert config.vllm_image.startswith("vllm/vllm-openai:")
    assert config.sglang_image.startswith("lmsysorg/sglang:")


def test_a_share_of_rollouts_is_a_number_or_a_percentage() -> None:
    for text, share in (("", "5%"), ("3", "3"), ("100%", "100%"), ("1%", "1%"), ("10000", "10000")):
        found = OperatorConfig.from_env({**ENV, "ARGOSY_MAX_CONCURRENT_ROLLOUTS": text})
        assert str(found.max_concurrent_rollouts) == share


def test_no_fleet_key_is_needed_where_the_operator_is_to_make_it() -> None:
    config = OperatorConfig.from_env(
        {
            **ENV,
            "ARGOSY_FLEET_KEY": "",
            "ARGOSY_FLEET_KEY_SECRET": "argosy-fleet-key",
            "ARGOSY_ROUTER_KEYS_SECRET": "argosy-router-keys",
            "ARGOSY_IMAGE_PULL_SECRETS": "registry,other",
            "ARGOSY_ENGINE_SERVICE_ACCOUNTS": "models, identity",
        }
    )
    assert (config.fleet_key, config.fleet_key_secret) == (b"", "argosy-fleet-key")
    assert config.router_keys_secret == "argosy-router-keys"
    assert config.image_pull_secrets == ("registry", "other")
    assert config.engine_service_accounts == ("models", "identity")


def test_settings_of_models() -> None:
    config = OperatorConfig.from_env(
        {
            **ENV,
            "ARGOSY_MODEL_FETCH_ENV": '{"HTTPS_PROXY": "http://proxy:3128"}',
            "ARGOSY_NODE_CACHE_PATH": "/var/lib/argosy/",
            "ARGOSY_NODE_CACHE_SELECTOR": '{"gpu": "h200"}',
            "ARGOSY_IMAGE_VOLUMES": "1",
            "ARGOSY_MODEL_NAMES": '{"team": ["a-*"]}',
        }
    )
    assert config.model_names == {"team": ("a-*",)}
    assert config.fetch_env == {"HTTPS_PROXY": "http://proxy:3128"}
    assert (config.node_cache_path, config.node_cache_selector) == ("/var/lib/argosy", {"gpu": "h200"})
    assert config.image_volumes
    unset = OperatorConfig.from_env(ENV)
    assert (unset.fetch_env, unset.node_cache_path, unset.node_cache_selector) == ({}, "", {})
    assert not unset.image_volumes


@pytest.mark.parametrize(
    ("change", "variable"),
    [
        ({"POD_NAMESPACE": ""}, "POD_NAMESPACE"),
        ({"ARGOSY_FLEET_KEY": ""}, "ARGOSY_FLEET_KEY"),
        ({"ARGOSY_FLEET_KEY": "short", "ARGOSY_FLEET_KEY_SECRET": "s"}, "ARGOSY_FLEET_KEY"),
        ({"ARGOSY_FLEET_KEY": "short"}, "ARGOSY_FLEET_KEY"),
        ({"ARGOSY_ENGINE_IMAGE": ""}, "ARGOSY_ENGINE_IMAGE"),
        ({"ARGOSY_ENGINE_UPGRADE_POLICY": "Never"}, "ARGOSY_ENGINE_UPGRADE_POLICY"),
        ({"ARGOSY_IMAGE_PULL_POLICY": "Sometimes"}, "ARGOSY_IMAGE_PULL_POLICY"),
        ({"ARGOSY_MODEL_FETCH_ENV": "HTTPS_PROXY=a"}, "ARGOSY_MODEL_FETCH_ENV"),
        ({"ARGOSY_MODEL_FETCH_ENV": '{"A": 1}'}, "ARGOSY_MODEL_FETCH_ENV"),
        ({"ARGOSY_MODEL_NAMES": '{"team": "a-*"}'}, "ARGOSY_MODEL_NAMES"),
        ({"ARGOSY_NODE_CACHE_PATH": "var/lib"}, "ARGOSY_NODE_CACHE_PATH"),
        ({"ARGOSY_NODE_CACHE_PATH": "/"}, "ARGOSY_NODE_CACHE_PATH"),
        ({"ARGOSY_NODE_CACHE_PATH": "/var/../etc"}, "ARGOSY_NODE_CACHE_PATH"),
        ({"ARGOSY_NODE_CACHE_SELECTOR": "[]"}, "ARGOSY_NODE_CACHE_SELECTOR"),
        ({"ARGOSY_IMAGE_VOLUMES": "yes"}, "ARGOSY_IMAGE_VOLUMES"),
        *(
            ({"ARGOSY_MAX_CONCURRENT_ROLLOUTS": text}, "ARGOSY_MAX_CONCURRENT_ROLLOUTS")
            for text in ("0", "0%", "101%", "10001", "5.5%", "-1", "%", "many", "٣")
        ),
    ],
)
def test_wrong_settings_are_named(change: dict[str, str], variable: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        OperatorConfig.from_env({**ENV, **change})


def test_a_mounted_fleet_key_needs_no_variable() -> None:
    env = {name: value for name, value in ENV.items() if name != "ARGOSY_FLEET_KEY"}
    config = OperatorConfig.from_env({**env, "ARGOSY_FLEET_KEY_DIR": "/etc/argosy-fleet-key"})
    assert (config.fleet_key, str(config.fleet_key_dir)) == (b"", "/etc/argosy-fleet-key")
    used = config.with_fleet_keys((b"n" * 32, b"o" * 32))
    assert (used.fleet_key, used.previous_fleet_keys) == (b"n" * 32, (b"o" * 32,))
    with pytest.raises(ConfigError, match="ARGOSY_FLEET_KEY_DIR"):
        OperatorConfig.from_env({**env, "ARGOSY_FLEET_KEY_DIR": "relative"})
