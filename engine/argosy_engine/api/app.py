"""The engine's FastAPI application.

The server listens from the first second: while the model loads, /health answers 200 (the process lives), /ready 503
with the phase, and requests 503 with a retry hint.
"""

from __future__ import annotations

from argosy_engine.api.error_handlers import handle_errors
from argosy_engine.api.openapi_routes import add_openapi_routes
from argosy_engine.api.plain_route import PlainApp
from argosy_engine.api.routes.admin_routes import add_admin_routes
from argosy_engine.api.routes.info_routes import add_info_routes
from argosy_engine.api.routes.message_routes import add_message_routes
from argosy_engine.api.routes.openai_routes import add_openai_routes
from argosy_engine.api.routes.pooling_routes import add_pooling_routes
from argosy_engine.api.routes.response_routes import add_response_routes
from argosy_engine.api.routes.sagemaker_routes import add_sagemaker_routes
from argosy_engine.api.routes.state_routes import add_state_routes
from argosy_engine.api.served_engine import Engine
from argosy_protocol import __version__


def build_app(engine: Engine) -> PlainApp:
    """Build the application, without the layers around it (`http_layers`)."""
    app = PlainApp(
        title="Argosy engine", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.engine = engine
    endpoints = add_openai_routes(app, engine)
    endpoints |= add_pooling_routes(app, engine)
    add_sagemaker_routes(app, endpoints)
    add_message_routes(app, engine)
    add_response_routes(app, engine)
    add_state_routes(app, engine)
    add_admin_routes(app, lambda: engine.loaded, engine.sleep_operation)
    add_info_routes(app, lambda: engine.loaded, engine.options.enable_tokenizer_info_endpoint)
    if not engine.options.disable_fastapi_docs:
        add_openapi_routes(app)
    handle_errors(app)
    app.find_plain_routes()
    return app
