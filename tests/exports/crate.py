"""Show a crate to RO-Crate's own validator, without network: python crate.py FOLDER.

The validator reads RO-Crate's context from the web; here it gets the one that the `rocrate` library ships. Prints what
it objects to, one line each with its severity.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from requests_cache import CachedSession
from requests_cache.models import CachedRequest, CachedResponse
from rocrate_validator import models, services

CONTEXT = "https://w3id.org/ro/crate/1.1/context"
ACCEPT = "application/ld+json, application/json"


def remember_context(cache: str) -> None:
    """Put the context into the validator's cache, as if it had been fetched once."""
    headers = {"Content-Type": "application/ld+json"}
    request = CachedRequest(method="GET", url=CONTEXT, headers={"Accept": ACCEPT})
    response = CachedResponse(status_code=200, url=CONTEXT, headers=headers, request=request)
    response._content = resources.files("rocrate").joinpath("data/ro-crate.jsonld").read_bytes()
    CachedSession(cache, backend="sqlite").cache.save_response(response)


with tempfile.TemporaryDirectory() as folder:
    cache = str(Path(folder) / "cache")
    remember_context(cache)
    settings = models.ValidationSettings(
        rocrate_uri=sys.argv[1],
        profile_identifier="ro-crate-1.1",
        requirement_severity=models.Severity.RECOMMENDED,
        offline=True,
        cache_path=cache,
    )
    found = services.validate(settings)
print("validated")
for issue in found.get_issues():
    print(f"{issue.severity.name} {issue.check.identifier} {issue.violatingEntity} {issue.message}".replace("\n", " "))
