"""File that `conformance judge --init --loop` writes: the declaration of a trainer's own loop.

The file is read, not imported: models, the optimizer and the loader are found by their calls.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.importing import companion_of
from reference_trainer.checks import UsageError

_OPTIMIZERS = ("AdamW", "Adam", "SGD", "NAdam", "RAdam", "Adagrad", "Adafactor", "RMSprop", "Adamax", "LBFGS", "Muon")
_LIMITS = ("max_norm", "max_grad_norm", "grad_clip", "clip_norm", "clip_grad_norm", "gradient_clip_val", "clip")
_ACCUMULATIONS = ("accumulation", "accumulation_steps", "gradient_accumulation_steps", "grad_accum", "accum_steps")


@dataclass(frozen=True)
class _Parameters:
    """Names of the parameters of a function or of a class's constructor."""

    names: Sequence[str]

    def one_of(self, names: Sequence[str]) -> str | None:
        """Return the first parameter with one of some names, or None."""
        return next((name for name in self.names if name in names), None)


def write_for(trainer: str) -> tuple[Path, str]:
    """Write the file that judges `FILE.py:NAME`, a function or a class; returns its path and the subject.

    Raises UsageError for a name that is not there, and for a file that exists.
    """
    given, _, name = trainer.partition(":")
    file = Path(given)
    if file.suffix != ".py" or not name:
        raise UsageError(f"--loop {trainer}: give FILE.py:NAME, a function that trains or a class of a trainer")
    if not file.is_file():
        raise UsageError(f"no file {file}")
    target = companion_of(file)
    if target.exists():
        raise UsageError(f"{target} exists: remove it, or judge it")
    try:
        tree = ast.parse(file.read_text())
    except SyntaxError as error:
        raise UsageError(f"{file} is no Python: {error}") from None
    target.write_text(_text(tree, file.stem, name))
    return target, f"{target}:train"


def _text(tree: ast.Module, module: str, name: str) -> str:
    definition = _definition(tree, name)
    if definition is None:
        known = ", ".join(each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef))
        raise UsageError(f"{module}.py has no `{name}`; functions and classes there: {known or 'none'}")
    call, accumulates = _call(module, definition)
    reads_loader = any(name == "DataLoader" for name, _ in _calls(tree))
    options = [
        f"    model={_model(tree, module)},",
        "    loss=loss,",
        "    batch=batch,",
        f"    optimizer={_optimizer(tree)},",
    ]
    if reads_loader or isinstance(definition, ast.FunctionDef):
        options.append(f'    accumulation="{"even" if accumulates else "none"}",')
    return _TEMPLATE.format(
        module=module,
        name=name,
        file=companion_of(Path(f"{module}.py")).name,
        options="\n".join(options),
        body=_body(definition, call, reads_loader=reads_loader),
        guard=_guard(tree),
    )


def _definition(tree: ast.Module, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    found = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name]
    return found[0] if found else None


def _call(module: str, definition: ast.FunctionDef | ast.ClassDef) -> tuple[str, bool]:
    """Return the call of a trainer with the suite's limit and accumulation where it takes them."""
    parameters = _parameters(definition)
    arguments = []
    for names, value in ((_LIMITS, "config.max_norm"), (_ACCUMULATIONS, "config.accumulation")):
        taken = parameters.one_of(names)
        arguments += [f"{taken}={value}"] if taken else []
    left = [name for name in _required(definition) if not any(each.startswith(f"{name}=") for each in arguments)]
    arguments = [f"{name}={_guess(name)}" for name in left] + arguments
    return f"{module}.{definition.name}({', '.join(arguments)})", parameters.one_of(_ACCUMULATIONS) is not None


def _body(definition: ast.FunctionDef | ast.ClassDef, call: str, *, reads_loader: bool) -> str:
    lines = []
    if "config.max_norm" not in call:
        lines.append(
            "    # FILL IN: hand config.max_norm to the trainer, or declare max_norm= with the limit that it clips to."
        )
    if isinstance(definition, ast.FunctionDef):
        if not reads_loader:
            lines.append("    # FILL IN: let it read config.loader or config.next_batch(), in place of its own data.")
        return "\n".join([*lines, f"    return {call}"])
    step = next((each for each in _methods(definition) if each.startswith(("train_step", "step", "train_batch"))), None)
    lines += [f"    trainer = {call}", "    for micro_batches in config.steps:"]
    if step is None:
        lines.append("        # FILL IN: the trainer's own calls that train one step on these micro-batches.")
    lines.append(f"        yield trainer.{step or 'train_step'}(micro_batches)")
    return "\n".join(lines)


def _guess(name: str) -> str:
    known = {"model": "config.model()", "mesh": "config.device_mesh()", "device": "config.device"}
    return known.get(name, "...")


def _parameters(definition: ast.FunctionDef | ast.ClassDef) -> _Parameters:
    function = _constructor(definition)
    if function is None:
        return _Parameters([])
    return _Parameters([each.arg for each in (*function.args.args, *function.args.kwonlyargs) if each.arg != "self"])


def _required(definition: ast.FunctionDef | ast.ClassDef) -> list[str]:
    function = _constructor(definition)
    if function is None:
        return []
    positional = function.args.args[: len(function.args.args) - len(function.args.defaults)]
    keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return [each.arg for each in positional if each.arg != "self"] + [
        each.arg for each, value in keywords if value is None
    ]


def _constructor(definition: ast.FunctionDef | ast.ClassDef) -> ast.FunctionDef | None:
    if isinstance(definition, ast.FunctionDef):
        return definition
    return next(
        (each for each in definition.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None
    )


def _methods(definition: ast.ClassDef) -> list[str]:
    return [each.name for each in definition.body if isinstance(each, ast.FunctionDef)]


def _model(tree: ast.Module, module: str) -> str:
    """Return the constructor of the model: the last class of modules that the file makes, or a line to fill in."""
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef) and _is_module(each)]
    inside = {name for each in classes for name, _ in _calls(each)}
    outermost = [each.name for each in classes if each.name not in inside]
    return f"{module}.{outermost[-1]}" if outermost else "...,  # FILL IN: the model for one process, in fp32"


def _is_module(definition: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("Module") for base in definition.bases)


def _optimizer(tree: ast.Module) -> str:
    """Return a function that makes the optimizer which the file makes, if its options are written there."""
    for name, call in _calls(tree):
        if name in _OPTIMIZERS:
            options = [f"{each.arg}={ast.unparse(each.value)}" for each in call.keywords if _is_literal(each.value)]
            return f"lambda parameters: torch.optim.{name}({', '.join(['parameters', *options])})"
    return "lambda parameters: torch.optim.SGD(parameters),  # FILL IN: that of the loop; a wrong one is told"


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield all calls, by the last name of the function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node


def _guard(tree: ast.Module) -> str:
    """Return a line about statements that train when the file is imported."""
    trains = [each for each in tree.body if isinstance(each, ast.For | ast.While)]
    return "# FILL IN: move the loop at the top level of the file into a function.\n" if trains else ""


_TEMPLATE = '''"""Declaration with which the FSDP2 + TP conformance suite judges {module}.py:{name} as it stands.

    conformance judge {file}:train
"""

import torch
import torch.nn.functional as F

import {module}
from conformance.subjects import own_loop

{guard}
def batch(generator):
    """FILL IN: one micro-batch as the loop gets it. All that is random must come from the generator."""
    tokens = torch.randint(8, (4, 8), generator=generator)
    return [tokens, tokens.roll(-1, dims=1)]


def loss(model, batch):
    """FILL IN: the SUM of the losses of all samples or tokens of a micro-batch."""
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten(), reduction="sum")


@own_loop(
{options}
)
def train(config):
{body}
'''
