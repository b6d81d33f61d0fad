"""`spec.model`: which model is served, where it comes from, and where it is kept.

Owns the types, and the grammar of `spec.model.source` as CEL rules. They repeat the grammar of
`argosy_fetcher.source_uri`, which the operator does not import, as far as CEL can say it, and are stricter in two
points: http:// is for loopback addresses, so a manifest has none, and no part of a path may be `..`. Must not know how
a model is fetched. Invariants: a field that the source has no use for is refused; the tests run one table of sources
through these rules, through an API server and through the fetcher's parser.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Struct

from argosy_resource.schema_types import (
    MAP_BY_NAME,
    SET,
    ObjectName,
    Quantity,
    Rule,
    SecretName,
    ServedName,
    rules_of,
)

REMOTE_SCHEMES: Final = ("hf", "s3", "gs", "oci", "https")
"""Schemes whose models are fetched."""
LOCAL_SCHEMES: Final = ("pvc", "file", "builtin")
"""Schemes whose models are in a volume or in the engine's container already."""

MODEL_MOUNT: Final = "/model"
"""Mount path of a volume that is the model: the claim of a `pvc://` source, or the image of an `oci://` source."""
LINKED_MODEL: Final = f"{MODEL_MOUNT}/linked"
"""A link to a fetched model, for an engine that does not know the store."""
MODELS_MOUNT: Final = "/models"
"""Mount path of the volume that fetched models are kept in."""

_OCI: Final = "oci://"
_HUB_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_COMPONENT: Final = "[a-z0-9]+(([.]|_{1,2}|-+)[a-z0-9]+)*"
_IPV6: Final = r"\[[0-9A-Fa-f:.]{2,45}\]"

_GRAMMAR: Final[dict[str, tuple[str, str]]] = {
    "hf": (
        rf"self.matches(r'^hf://{_HUB_NAME}/{_HUB_NAME}(:{_HUB_NAME})?(@[A-Za-z0-9_][A-Za-z0-9._/+-]{{0,254}})?$') && "
        r"!self.matches(r'@.*([.][.]|//|/$|[.]lock$)')",
        "hf://ORG/NAME or hf://ORG/NAME@REVISION, a branch, a tag or a commit; a GGUF file is hf://ORG/NAME:QUANT",
    ),
    "s3": (
        r"self.matches(r'^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?$') && !self.matches(r'^s3://[^/]*[.][.]')",
        "s3://BUCKET or s3://BUCKET/PREFIX",
    ),
    "gs": (
        r"self.matches(r'^gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/.*)?$') && "
        r"!self.matches(r'^gs://[^/]*[.][.]')",
        "gs://BUCKET or gs://BUCKET/PREFIX",
    ),
    "oci": (
        rf"self.matches(r'^oci://([A-Za-z0-9]([A-Za-z0-9.-]{{0,251}}[A-Za-z0-9])?|{_IPV6})(:[0-9]{{1,5}})?"
        rf"/{_COMPONENT}(/{_COMPONENT})*(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?$')",
        "oci://HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]",
    ),
    "https": (
        rf"self.matches(r'^https://([A-Za-z0-9._-]+|{_IPV6})(:[0-9]{{1,5}})?/([^?# ]*/)?SHA256SUMS$')",
        "https://HOST[:PORT]/PATH/SHA256SUMS, without user, password and query: credentials are in secretRef",
    ),
    "pvc": (
        r"self.matches(r'^pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/.*)?$')",
        "pvc://CLAIM or pvc://CLAIM/PATH",
    ),
    "file": (r"self.matches(r'^file:///.+')", "file:///ABSOLUTE/PATH"),
    "builtin": ("self == 'builtin://tiny'", "builtin://tiny"),
}
"""Scheme -> its rule, and its form in words."""

_known: Final = [f"{scheme}://" for scheme in _GRAMMAR]

SOURCE_RULES: Final[dict[str, Any]] = rules_of(
    Rule(
        rule=f"self.matches('^({'|'.join(_GRAMMAR)})://')",
        message=(
            f"must begin with {', '.join(_known[:-1])} or {_known[-1]}; a repository of a hub is hf://ORG/NAME, a "
            "directory is file:///PATH"
        ),
    ),
    *(
        Rule(rule=f"!self.startsWith('{scheme}://') || ({rule})", message=f"must be {form}")
        for scheme, (rule, form) in _GRAMMAR.items()
    ),
    Rule(
        rule="!self.contains('/../') && !self.endsWith('/..')",
        message="must not contain '..' as a path segment",
    ),
    Rule(
        rule=r"!self.matches(r'^(s3|gs)://[^/]*/(.*/)?[.](/|$)') && !self.matches(r'^(s3|gs)://[^/]+/+[^/].*//+[^/]')",
        message="must not contain '.' as a path segment, nor an empty one",
    ),
    Rule(rule=r"!self.matches(r'[\x00-\x1f\x7f-\x9f]')", message="must not contain control characters"),
)
"""`extra_json_schema` of a source."""

GGUF_PATTERN: Final = "^(hf://[^@]+/[^@]*:|(s3|gs)://.*[.]gguf/*$)"
"""Matches the sources that are GGUF files; for CEL rules over other fields."""

REMOTE_PATTERN: Final = f"^({'|'.join(REMOTE_SCHEMES)})://"
"""Begins the sources that are fetched; for CEL rules over other fields."""

FETCH_ENV: Final = [
    *("ARGOSY_CREDENTIALS_DIR", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "GOOGLE_BASE_URL", "HF_ENDPOINT"),
    "STORAGE_EMULATOR_HOST",
]
"""Variables that are part of a model's name in the store, or lead to such. In an engine alone they make it look for
another model than was fetched."""
FETCH_ENV_MESSAGE: Final = (
    "the engine does not fetch: HF_ENDPOINT, AWS_ENDPOINT_URL and other addresses and credentials of sources belong in "
    "the Secret of spec.model.secretRef, or in the Helm chart's modelFetch.env"
)
FETCH_CREDENTIALS: Final = [
    *("ARGOSY_HTTPS_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ROLE_ARN", "AWS_SECRET_ACCESS_KEY"),
    *(
        "AWS_SESSION_TOKEN",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "DOCKER_AUTH_CONFIG",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
    *(
        "GOOGLE_BEARER_TOKEN",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HUGGING_FACE_HUB_TOKEN",
    ),
    *("OCI_PASSWORD", "OCI_USERNAME", "REGISTRY_AUTH_FILE"),
]
"""Variables by which the fetcher gets access. In our engine they have no effect, since another container fetches; other
engines may fetch more than the model, such as a draft model."""
FETCH_CREDENTIALS_MESSAGE: Final = (
    "the engine does not fetch: HF_TOKEN, AWS_ACCESS_KEY_ID and other credentials of sources belong in the Secret of "
    "spec.model.secretRef; on a machine without a cluster, in the environment of `argosy up`"
)


def is_remote(source: str) -> bool:
    """Whether the model has to be fetched."""
    return source.partition("://")[0] in REMOTE_SCHEMES


def image_reference(source: str) -> str | None:
    """The image of an `oci://` source, as container runtimes write it; else None."""
    return source.removeprefix(_OCI) if source.startswith(_OCI) else None


ModelSource = Annotated[str, Meta(min_length=1, max_length=1024, extra_json_schema=SOURCE_RULES)]


class SecretReference(Struct, frozen=True, kw_only=True, rename="camel"):
    """A Secret of the resource's own namespace."""

    name: SecretName
    """Name of the Secret."""


class ModelCache(Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a fetched model is kept."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="(has(self.type) && self.type == 'claim') == has(self.claimName)",
            message="claimName belongs to type claim: set both, or neither",
            field_path=".claimName",
        ),
        Rule(
            rule="!has(self.sizeLimit) || !has(self.type) || self.type == 'none'",
            message="sizeLimit is for type none only; a claim has its own size, and a node's cache that of the chart",
            field_path=".sizeLimit",
        ),
    )
    type: Literal["none", "node", "claim"] = "none"
    """`none`: each pod fetches the model for itself, and it goes with the pod. `node`: the pods of a node share a
    directory of the node, if the operator's settings provide one. `claim`: the pods share a PersistentVolumeClaim."""
    claim_name: ObjectName | None = None
    """PersistentVolumeClaim of the same namespace, for type claim. With replicas on several nodes it must be
    ReadWriteMany."""
    size_limit: Quantity | None = None
    """Most that the model may take of the node's ephemeral storage, for type none, such as `60Gi`; no limit if left
    out."""


class Adapter(Struct, frozen=True, kw_only=True, rename="camel"):
    """A LoRA adapter of the model."""

    name: ServedName
    """Name of the adapter."""
    source: Annotated[str, Meta(min_length=1, max_length=1024)]
    """Where the adapter is."""


class Model(Struct, frozen=True, kw_only=True, rename="camel"):
    """Which model is served, and under which names."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.adapters)",
            message=(
                "adapters are not served yet; merge the adapter into the model, and serve it as a service of its own"
            ),
            field_path=".adapters",
        ),
        Rule(
            rule=f"!has(self.secretRef) || self.source.matches('{REMOTE_PATTERN}')",
            message="secretRef is for models that are fetched; this source needs no credentials",
            field_path=".secretRef",
        ),
        Rule(
            rule=f"!has(self.cache) || self.source.matches('{REMOTE_PATTERN}')",
            message="cache is for models that are fetched; this source is in its place already",
            field_path=".cache",
        ),
        Rule(
            rule=f"has(self.widenedSize) || !self.source.matches(r'{GGUF_PATTERN}')",
            message=(
                "a GGUF file is widened on the node's disk before it is loaded: set widenedSize to the room that this "
                "takes, 2 bytes for each parameter in bfloat16 and 4 in float32, such as 16Gi for 8 billion"
            ),
            field_path=".widenedSize",
        ),
        Rule(
            rule=f"!has(self.widenedSize) || self.source.matches(r'{GGUF_PATTERN}')",
            message="widenedSize is for GGUF files (hf://ORG/NAME:QUANT, s3://BUCKET/FILE.gguf) only; leave it out",
            field_path=".widenedSize",
        ),
        Rule(
            rule="!has(self.servedName) || !has(self.aliases) || !(self.servedName in self.aliases)",
            message="aliases must not repeat servedName",
            field_path=".aliases",
        ),
    )
    source: ModelSource
    """Where the model is. Fetched before the engine starts: `hf://ORG/NAME[@REVISION]`, `hf://ORG/NAME:QUANT[@REVISION]`
    (one GGUF file), `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `oci://HOST/REPOSITORY[:TAG][@sha256:DIGEST]`,
    `https://HOST/PATH/SHA256SUMS` (a folder).
    There already: `pvc://CLAIM/PATH` (a PersistentVolumeClaim of the same namespace, mounted
    read-only), `file:///ABSOLUTE/PATH` (a path inside the engine container, mounted through podTemplate or part of the
    image), `builtin://tiny` (the model that ships with the engine)."""
    secret_ref: SecretReference | None = None
    """Secret of the same namespace with the source's credentials. Its keys are named like the variables that the
    source's own tools read: `HF_TOKEN`, `AWS_ACCESS_KEY_ID` and so on. Only the container that fetches gets it."""
    widened_size: Quantity | None = None
    """Room on the node's disk for the widened weights of a GGUF file, which the engine makes of it before it loads
    them: 2 bytes for each parameter in bfloat16, 4 in float32. The engine requests it as ephemeral storage, besides
    the room of the file. Required for a GGUF file, refused for others."""
    cache: ModelCache | None = None
    """Where a fetched model is kept; type none if left out."""
    served_name: ServedName | None = None
    """Name that clients send as `model`. The resource's name if left out. It must not begin with the name of another
    namespace and `/`, nor be another service's; clients then have `namespace/name` alone."""
    aliases: Annotated[tuple[ServedName, ...], Meta(max_length=32, extra_json_schema=SET)] = ()
    """Further names under which clients may ask for the model, of which the same is true."""
    adapters: Annotated[tuple[Adapter, ...], Meta(max_length=64, extra_json_schema=MAP_BY_NAME)] | None = None
    """Reserved for LoRA adapters, and refused until the engine serves them."""
