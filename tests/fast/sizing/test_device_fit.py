"""`predict --device-memory`: what fits, by how much, and which other settings would."""

import json

import pytest
from expecttest import assert_expected_inline
from msgspec.structs import replace

from conformance.__main__ import main
from conformance.sizing.prediction import DeviceFit, Request, device_fit, parse_bytes, prediction
from conformance.sizing.rendering import prediction_text

FOUR_LAYERS = Request(model="llama3-8b", mesh="dp8", overrides=("n_layers=4",))


def fit_of(request: Request, size: str) -> DeviceFit:
    return device_fit(request, prediction(request).phases, device_bytes=parse_bytes(size))


def verdict(request: Request, size: str) -> str:
    """Return the paragraph of the text that is about the device."""
    text = prediction_text(request, prediction(request), fit_of(request, size))
    (paragraph,) = [p for p in text.split("\n\n") if "of device memory" in p]
    return "\n".join(line.rstrip() for line in paragraph.splitlines())


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("1.5 GiB", 3 * 2**29), ("512MiB", 2**29), ("1MB", 10**6)],
)
def test_sizes(size: str, nbytes: int) -> None:
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize("size", ["", "80", "GiB", "80G", "80gib", "-1GiB", "0GiB", "1e3GiB", "80 GiB or so", "nanGiB"])
def test_other_sizes(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model=llama3-8b", "--mesh=dp8", f"--device-memory={size}"]) == 4
    message = f"device memory {size}: write a number above 0 and a unit, one of MiB, GiB, MB, GB: 80GiB"
    assert message in capsys.readouterr().err


def test_what_fits() -> None:
    assert_expected_inline(
        verdict(FOUR_LAYERS, "24GiB"),
        """Fits into 24.00 GiB of device memory: 1.01 GiB left at the peak, in backward.""",
    )


def test_what_would_fit() -> None:
    assert_expected_inline(
        verdict(FOUR_LAYERS, "21GiB"),
        """\
Does not fit into 21.00 GiB of device memory: 1.99 GiB too much in backward.
These would fit, the least recomputation first:
--reshard    --activation-checkpointing      peak (GiB)    left (GiB)
-----------  ----------------------------  ------------  ------------
except-last  selective                            20.65          0.35
default      selective                            20.24          0.76
always       selective                            19.26          1.74
never        full                                 20.35          0.65
except-last  full                                 18.15          2.85
default      full                                 17.74          3.26
always       full                                 16.76          4.24""",
    )


def test_what_never_fits() -> None:
    assert_expected_inline(
        verdict(FOUR_LAYERS, "1GiB"),
        """\
Does not fit into 1.00 GiB of device memory: 21.99 GiB too much in backward.
Nor does any --reshard (never, except-last, default, always) together with any
--activation-checkpointing (none, selective, full): the least is 16.76 GiB, with --reshard always
--activation-checkpointing full. Try more ranks, or fewer or shorter samples, or --offload cpu.""",
    )


def test_other_settings_have_the_peaks_that_they_are_predicted_to_have() -> None:
    fit = fit_of(FOUR_LAYERS, "12GiB")
    assert not fit.fits
    assert len(fit.tried) == 11
    for setting in fit.tried:
        asked_for = replace(
            FOUR_LAYERS, reshard=setting.reshard, activation_checkpointing=setting.activation_checkpointing
        )
        peak_bytes = max(memory.peak_bytes for memory in prediction(asked_for).phases.values())
        assert setting.peak_bytes == peak_bytes == 12 * 2**30 - setting.left_bytes


def test_a_device_of_just_the_peak() -> None:
    peak_bytes = max(memory.peak_bytes for memory in prediction(FOUR_LAYERS).phases.values())
    phases = prediction(FOUR_LAYERS).phases
    assert device_fit(FOUR_LAYERS, phases, device_bytes=peak_bytes).fits
    assert device_fit(FOUR_LAYERS, phases, device_bytes=peak_bytes - 1).left_bytes == -1


def test_exit_status_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["predict", "--model=llama3-8b", "--mesh=dp8", "--set=n_layers=4", "--json", "--device-memory"]
    assert main([*arguments, "80GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["device"]["tried"] == []
    assert main([*arguments, "12GiB"]) == 1
    device = json.loads(capsys.readouterr().out)["device"]
    assert device["left_bytes"] < 0
    assert device["phase"] == "backward"
