"""ServerSettings: the flags of the HTTP front. It knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanoserve.core.config import setting
from nanoserve.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 takes connections from other machines")
    port: int = setting(8000, "port to listen on; 0 takes any that is free")
    served_model_name: tuple[str, ...] = setting((), "names clients may call the model by; default: as --model")
    api_key: tuple[str, ...] = setting((), "keys that open the server; every route but /health and /version wants one")
    allowed_origins: tuple[str, ...] = setting((), "web origins whose pages may call the server; * for all")
    root_path: str = setting("", "path that a proxy puts before the server's own, and may strip")
    chat_template: str | None = setting(None, "file with a chat template to use instead of the model's, or its text")
    ssl_keyfile: str | None = setting(None, "private key of the server's certificate")
    ssl_certfile: str | None = setting(None, "the server's certificate")
    shutdown_timeout: int = setting(30, "seconds that running requests have to end after a signal to stop")
    max_body_bytes: int = setting(4 * 2**20, "longest request body; beyond it 413")
    body_timeout: int = setting(60, "seconds a client has to send a body; beyond it 408")
    max_header_bytes: int = setting(64 * 2**10, "longest request line with headers; beyond it 400")
    max_choices: int = setting(1024, "most choices (prompts times n) of one call")
    health_timeout: int = setting(10, "seconds the engine has to answer for /health")

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port must be 0 to 65535, not {self.port}")
        if "" in self.api_key:
            raise ConfigError("--api-key is empty: a key that anyone can guess")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together; one of them is missing")
        for name in ("ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ConfigError(f"--{name.replace('_', '-')}: there is no file {path}")

    def template_source(self) -> str | None:
        """The text of --chat-template, which names a file or is the text itself."""
        given = self.chat_template
        if given is None or "{" in given:
            return given
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {given}: cannot be read ({error})") from error
