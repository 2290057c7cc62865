"""Fixtures: the reference vectors, computed by the family's own public modelling code, and small random models."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from experiments import ouro
from experiments.batch import Group, Response
from experiments.family import LoopedModel
from experiments.latent import GivenLatent, Latent, PositionLatent
from experiments.toys import toy

REFERENCE = Path(__file__).parent / "reference"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def reference_folder() -> Callable[[str], Path]:
    return lambda name: REFERENCE / name


@pytest.fixture(scope="session")
def reference() -> Callable[[str], tuple[dict[str, Tensor], Group]]:
    """Return the published results in a folder, and the group they were computed from."""

    def read(name: str) -> tuple[dict[str, Tensor], Group]:
        expected = load_file(REFERENCE / name / "expected.safetensors")
        lengths = expected["response_lengths"].tolist()
        columns = (expected[key].split(lengths) for key in ("responses", "advantages", "reference_log_probs"))
        latent = GivenLatent(expected["initial_state"]) if "initial_state" in expected else None
        responses = tuple(Response(*parts, latent) for parts in zip(*columns, strict=True))
        return expected, Group(expected["prompt"], responses)

    return read


@pytest.fixture
def small_model() -> Callable[..., ouro.Ouro]:
    """Return random models: two layers, three loops, width 16, query heads sharing key/value heads unless asked."""

    def make(dtype: torch.dtype = torch.float64, key_value_heads: int = 2) -> ouro.Ouro:
        config = ouro.OuroConfig(
            width=16,
            inner=20,
            vocabulary=13,
            layers=2,
            loops=3,
            heads=4,
            key_value_heads=key_value_heads,
            head_dim=4,
            rope_theta=10000.0,
            norm_eps=1e-6,
        )
        generator = torch.Generator().manual_seed(7)
        model = ouro.Ouro(config).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                uniform = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
                parameter.copy_(uniform + (1 if parameter.ndim == 1 else 0))
        return model

    return make


@pytest.fixture(scope="session")
def small_group() -> Callable[..., Group]:
    """Return random groups over 13 tokens with the given response lengths."""

    def make(
        lengths: tuple[int, ...] = (3, 0, 1, 5, 2), prompt: int = 4, seed: int = 3, latent: Latent | None = None
    ) -> Group:
        generator = torch.Generator().manual_seed(seed)

        def response(length: int) -> Response:
            return Response(
                torch.randint(13, (length,), generator=generator),
                torch.rand(length, generator=generator, dtype=torch.float64) * 2 - 1,
                torch.rand(length, generator=generator, dtype=torch.float64) - 3,
                latent,
            )

        return Group(torch.randint(13, (prompt,), generator=generator), tuple(map(response, lengths)))

    return make


@pytest.fixture(params=["ouro", "nanbeige", "huginn"])
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return str(request.param)


@pytest.fixture
def case(family: str, small_group: Callable[..., Group]) -> Callable[..., tuple[LoopedModel, Group]]:
    """Return a toy of the family and a group that it can run."""

    def make(
        lengths: tuple[int, ...] = (3, 0, 1, 5, 2), dtype: torch.dtype = torch.float64, **group: int
    ) -> tuple[LoopedModel, Group]:
        latent = PositionLatent(17) if family == "huginn" else None
        return toy(family, dtype=dtype), small_group(lengths, latent=latent, **group)

    return make
