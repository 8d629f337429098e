"""Strict YAML: scalars that could be misread are refused, and every mistake has file and line."""

import dataclasses
import enum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_trainer.strict_yaml import ConfigError, Document, convert, load


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("yaml")


def read(folder: Path, text: str | bytes) -> Document:
    path = folder / "file.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(path)


def problem(folder: Path, text: str | bytes, type_: Any = None) -> str:
    """The message of the ConfigError, without the folder."""
    with pytest.raises(ConfigError) as caught:
        convert(read(folder, text), type_)
    return str(caught.value).removeprefix(f"{folder}/")


@pytest.mark.parametrize(
    ("scalars", "value"),
    [
        ("true True", True),
        ("FALSE", False),
        ("null ~", None),
        ("0", 0),
        ("-12", -12),
        ("+1", 1),
        ("0x1F", 31),
        ("0o17", 15),
        ("2.1 2.10", 2.1),
        ("2.0", 2.0),
        ("0.001 0.0010 1e-3 1.0e-3", 0.001),
        (".5 +.5", 0.5),
        ("5.", 5.0),
        (".5e3", 500.0),
        ("-.5E-1", -0.05),
        ("6E23", 6e23),
        ("'010' \"010\"", "010"),
    ],
)
def test_accepted_scalars(folder: Path, scalars: str, value: object) -> None:
    for text in scalars.split():
        result = read(folder, f"a: {text}\n").data["a"]
        assert (type(result), result) == (type(value), value)


def test_accepted_strings(folder: Path) -> None:
    for text in ("dp2-tp2", "1.2.3", "2024-01-31", "2024-99-99", "="):
        assert read(folder, f"a: {text}\n").data == {"a": text}
    document = read(folder, "a: two\n  words\nb: |\n  yes\nc:\n")
    assert document.data == {"a": "two words", "b": "yes\n", "c": None}


@pytest.mark.parametrize(
    ("scalars", "advice"),
    [
        ("on On ON yes y Y", "is true in YAML 1.1 and a word in YAML 1.2: write true, or quote it if it is a string"),
        ("off no NO n", "is false in YAML 1.1 and a word in YAML 1.2: write false, or quote it if it is a string"),
        ("010 -08 00 0_7", "is octal in YAML 1.1 and decimal in YAML 1.2: write it without the leading zero, or quote"),
        ("0b11 -0b1_1", "is a binary number in YAML 1.1 and a word in YAML 1.2: write a decimal number, or quote it"),
        ("1_000 1_0.5 0xF_F -_", "is a number in YAML 1.1 and a word in YAML 1.2: write it without `_`, or quote it"),
        ("1:30 -190:20:30 1:0.5", "is a number to base 60 in YAML 1.1: write a decimal number, or quote it"),
        ("inf -inf nan NaN .inf .nan 1e999 Infinity", "is not a finite number: write one, or quote it"),
        ("9" * 5000, "Exceeds the limit (4300 digits) for integer string conversion"),
        ("&a !!str !x !", "anchors, aliases and tags are not supported: write the value itself"),
        ("*a", "anchors, aliases and tags are not supported: write the value itself"),
    ],
    ids=lambda text: text.split()[0][:9],
)
def test_refused_scalars(folder: Path, scalars: str, advice: str) -> None:
    for text in scalars.split():
        for layout in (f"# x\na: {text}\n", f"# x\n{{a: [{text} ]}}\n"):
            message = problem(folder, layout)
            assert message.startswith("file.yaml:2: ")
            assert advice in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: the top level must be a mapping"),
        ("# x\n- 1\n", "2: the top level must be a mapping"),
        ("a: 1\nb: 2\na: 3\n", "3: duplicate key `a`: keep one of them"),
        ("a:\n  b: {c: 1,\n    c: 2}\n", "3: duplicate key `c`"),
        ("a: 1\n2: b\n", "2: the key `2` is not a string: write a name, or quote it"),
        ("a: 1\nnull: b\n", "2: the key `null` is not a string"),
        ("on: 1\n", "1: `on` is true in YAML 1.1 and a word in YAML 1.2"),
        ("%YAML 1.1\n---\na: on\n", "3: `on` is true in YAML 1.1"),
        ("? [a]\n: 1\n", "1: a key must be a string, not a list or a mapping"),
        ("a: 1\n<<: {b: 1}\n", "2: merge keys `<<` are not supported: write the keys out"),
        ("a: 1\n---\nb: 2\n", "2: expected a single document in the stream"),
        ("a: [1,\nb: 2\n", "3: while parsing a flow sequence: expected ',' or ']'"),
        ("a:\n\t- 1\n", "2: while scanning for the next token: found character '\\t'"),
        ("a: b: c\n", "1: mapping values are not allowed here"),
        ("a: 1\nb: \x07\n", "2: character U+0007 is not allowed: remove it"),
        (b"a: 1\nb: \xff\n", "2: not UTF-8: save the file as UTF-8"),
        ("a: " + "[" * 5000, "1: nested too deeply: write fewer levels"),
    ],
)
def test_refused_files(folder: Path, text: str | bytes, message: str) -> None:
    assert problem(folder, text).startswith(f"file.yaml:{message}")


def test_missing_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml:1: cannot be read: No such file"):
        load(folder / "none.yaml")


def test_lines_are_those_of_scalars_and_of_the_keys_of_containers(folder: Path) -> None:
    document = read(folder, "# x\na:\n  b:\n    - x\n    - {c: 1,\n       d: 2}\n  e:\n    text\n")
    assert document.data == {"a": {"b": ["x", {"c": 1, "d": 2}], "e": "text"}}
    assert document.lines == {
        "$": 2,
        "$.a": 2,
        "$.a.b": 3,
        "$.a.b[0]": 4,
        "$.a.b[1]": 5,
        "$.a.b[1].c": 5,
        "$.a.b[1].d": 6,
        "$.a.e": 8,
    }
    assert str(document.error("$.a.b[1].none.of[3]", "wrong\n  x\n  ^")) == (
        f"{document.path}:5: wrong - at `$.a.b[1].none.of[3]`\n  x\n  ^"
    )


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Inner(msgspec.Struct):
    rate: Annotated[float, msgspec.Meta(gt=0)]
    kind: Literal["ab", "cd"] = "ab"

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ValueError("rate is above 1")


class Other(msgspec.Struct, tag="other"):
    size: int


class Another(msgspec.Struct, tag="another"):
    name: str


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    many: dict[Annotated[str, msgspec.Meta(pattern="^[a-z]+$")], list[Inner]] = dataclasses.field(default_factory=dict)
    mode: Mode | None = None
    names: list[str] | Literal["all"] = "all"
    pair: tuple[int, str] = (0, "")
    union: Other | Another | None = None
    free: Any = None


def test_convert_accepts(folder: Path) -> None:
    text = (
        "inner: {rate: 1}\nmany: {k: [{rate: 0.5, kind: cd}]}\nmode: slow\nnames: [a]\npair: [1, b]\nfree: {x: [1]}\n"
    )
    assert convert(read(folder, text + "union: {type: other, size: 3}\n"), Outer) == Outer(
        inner=Inner(1.0),
        many={"k": [Inner(0.5, "cd")]},
        mode=Mode.SLOW,
        names=["a"],
        pair=(1, "b"),
        union=Other(3),
        free={"x": [1]},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "iner: 1",
            "2: unknown field `iner`; allowed: inner, many, mode, names, pair, union, free (did you mean `inner`?)",
        ),
        ("inner:\n  rate: x", "3: Expected `float`, got `str` - at `$.inner.rate`"),
        ("inner:\n  rate: true", "3: Expected `float`, got `bool` - at `$.inner.rate`"),
        ("inner:\n  rate: 0", "3: Expected `float` > 0.0 - at `$.inner.rate`"),
        ("inner:\n  kind: ab", "2: Object missing required field `rate` - at `$.inner`"),
        ("inner:\n  rate: 2", "2: rate is above 1 - at `$.inner`"),
        ("inner: 3", "2: Expected `object`, got `int` - at `$.inner`"),
        (
            "inner: {rate: 1}\nmany:\n  k:\n  - rate: 1\n  - rate: 1\n    kind: abc",
            "7: Invalid enum value 'abc'; allowed: ab, cd (did you mean `ab`?) - at `$.many.k[1].kind`",
        ),
        (
            "inner: {rate: 1}\nmany:\n  k:\n  - rate: 1\n    knd: ab",
            "6: unknown field `knd`; allowed: rate, kind (did you mean `kind`?) - at `$.many.k[0].knd`",
        ),
        ("inner: {rate: 1}\nmany:\n  K: []", "4: Expected `str` matching regex '^[a-z]+$' - at `$.many.K`"),
        ("inner: {rate: 1}\nmode: x", "3: Invalid enum value 'x'; allowed: fast, slow, null - at `$.mode`"),
        ("inner: {rate: 1}\nnames: al", "3: Invalid enum value 'al'; allowed: list, all (did you mean `all`?) - at"),
        (
            "inner: {rate: 1}\nnames: [a,\n  1]",
            "4: Expected `str`, got `int`: put the value in quotes - at `$.names[1]`",
        ),
        ("inner: {rate: 1}\npair: [1, 2]", "3: Expected `str`, got `int`: put the value in quotes - at `$.pair[1]`"),
        ("inner: {rate: 1}\npair: [1]", "3: Expected `array` of length 2, got 1 - at `$.pair`"),
        ("inner: {rate: 1}\nunion:\n  type: other\n  size: x", "5: Expected `int`, got `str` - at `$.union.size`"),
    ],
)
def test_convert_points_at_the_line(folder: Path, text: str, message: str) -> None:
    assert problem(folder, f"# x\n{text}\n", Outer).startswith(f"file.yaml:{message}")


@settings(deadline=None)
@given(value=st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_read_as_python_and_pyyaml_write_them(folder: Path, value: float) -> None:
    for text in (f"a: {value!r}\n", yaml.safe_dump({"a": value})):
        result = read(folder, text).data["a"]
        assert (type(result), repr(result)) == (type(value), repr(value))


@settings(deadline=None)
@given(
    text=st.text(alphabet="0123456789_.:+-eExXoOaAbBnNiIfFyY", min_size=1, max_size=6).filter(
        lambda t: t[0] not in "-:"
    )
)
def test_a_plain_scalar_has_one_meaning_or_is_refused(folder: Path, text: str) -> None:
    """An accepted scalar means the same to PyYAML, which reads YAML 1.1, or is a number that PyYAML does not know."""
    try:
        value = read(folder, f"a: {text}\n").data["a"]
    except ConfigError:
        return
    older = yaml.safe_load(f"a: {text}")["a"]
    if isinstance(value, str):
        assert value == text == str(older)  # a date is spelled as it was
        with pytest.raises(ValueError, match="could not convert"):
            float(text)
    elif isinstance(older, str):
        assert value == (int(text, 0) if isinstance(value, int) else float(text))
    else:
        assert (type(value), repr(value)) == (type(older), repr(older))


@settings(deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn", "Co", "Zl", "Zp"])))
def test_a_quoted_scalar_is_a_string(folder: Path, text: str) -> None:
    quoted = text.replace("'", "''")
    assert read(folder, f"a: '{quoted}'\n").data["a"] == text
