"""Where a user's Rollbook keeps its files, and the environment that Prefect, Ray and MLflow start in."""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from data.home import cache_folder, home_folder, store_url

SERVERS = "servers.json"  # written by infra.servers while they run

# Each is a default: what the user has set in the environment stays.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # what MLflow misses is filled in later: do not wait for it
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads on busy cores make a step 20 times slower
}


@dataclass(frozen=True)
class Home:
    """The folder of one user's runs: `.rollbook/` in the working folder, or ROLLBOOK_HOME."""

    root: Path

    @classmethod
    def find(cls) -> "Home":
        return cls(home_folder())

    @property
    def store_url(self) -> str:
        return store_url(self.root)

    @property
    def cache(self) -> Path:
        return cache_folder(self.root)

    @property
    def tracking_uri(self) -> str:
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def mlflow_artifacts(self) -> Path:
        return self.root / "mlflow-artifacts"

    @property
    def prefect(self) -> Path:
        return Path(os.environ.get("PREFECT_HOME") or self.root / "prefect")

    def run_folder(self, run: str) -> Path:
        """Log, lock and driver record of a run on this machine."""
        return self.root / "runs" / run

    def prepare(self) -> None:
        """Make the folder.

        Raises PermissionError, naming the folder, if it cannot be made.
        """
        try:
            self.prefect.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PermissionError(
                f"{self.root}: cannot make Rollbook's folder ({error.strerror}); "
                "set ROLLBOOK_HOME to a folder that you may write"
            ) from None

    def set_environment(self) -> None:
        """Defaults for Prefect, Ray and MLflow, which read them when they are imported: call before that."""
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("PREFECT_HOME", str(self.prefect))
        # While `rollbook up` runs, its Prefect server owns the database: a second one would lock it.
        with contextlib.suppress(FileNotFoundError):
            url = json.loads((self.root / SERVERS).read_text())["prefect_url"]
            os.environ.setdefault("PREFECT_API_URL", f"{url}/api")
