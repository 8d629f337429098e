"""Backward in two halves, as zero-bubble schedules compute it: the gradient of the input, then those of parameters.

The first half goes along the paths from the output to the input and keeps the gradient at each node where paths to
parameters branch off, and the graph below it. The second half goes on from there, one node after another. Written after
`torch/distributed/pipelining/_backward.py`, whose memory it needs: no more, and no less at any time.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class Branch:
    """Node on a path to the input from which the paths to some parameters branch off."""

    node: Node
    parameters: list[nn.Parameter] = field(default_factory=list)
    gradients: tuple[Tensor | None, ...] = ()
    """Gradients of the node's outputs."""

    def keep(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the gradients that arrive at the node."""
        self.gradients = gradients


def backward_of_input(
    output: Tensor, gradient: Tensor | None, x: Tensor, parameters: Iterable[nn.Parameter]
) -> tuple[Tensor, list[Branch]]:
    """Return the gradient of the leaf `x`, and the input of `backward_of_parameters`; detaches `output` from its graph.

    `gradient` is that of `output`, None for a scalar. Parameters are used once.
    """
    branches = _branches(output, x, parameters)
    hooks = [branch.node.register_prehook(branch.keep) for branch in branches]
    (input_gradient,) = torch.autograd.grad(output, x, gradient, retain_graph=True)
    for hook in hooks:
        hook.remove()
    output.detach_()
    return input_gradient, branches


def backward_of_parameters(branches: list[Branch], *, copies: bool) -> None:
    """Add the gradients of the parameters of each branch to those that they have; empties the list.

    `copies` says whether kept gradients are copied first, see `VersionTraits.halves_copy_gradients`.
    """
    while branches:
        branch = branches.pop(0)
        kept = [(GradientEdge(branch.node, i), g) for i, g in enumerate(branch.gradients) if g is not None]
        edges, gradients = zip(*((edge, g.clone() if copies else g) for edge, g in kept), strict=True)
        computed = torch.autograd.grad(edges, branch.parameters, gradients)
        for parameter, gradient in zip(branch.parameters, computed, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient


def _branches(output: Tensor, x: Tensor, parameters: Iterable[nn.Parameter]) -> list[Branch]:
    """Return the branches in the order of their first parameters."""
    users = _users(get_gradient_edge(output).node)
    on_path = _towards_output(get_gradient_edge(x).node, users)
    branches: dict[Node, Branch] = {}
    for parameter in parameters:
        (node,) = _towards_output(get_gradient_edge(parameter).node, users, until=on_path) & on_path
        branches.setdefault(node, Branch(node)).parameters.append(parameter)
    return list(branches.values())


def _users(root: Node) -> Mapping[Node, list[Node]]:
    """Return of each node of a graph those that hand gradients to it."""
    users, waiting = defaultdict[Node, list[Node]](list), [root]
    while waiting:
        user = waiting.pop()
        for node, _ in user.next_functions:
            if node is not None:
                waiting += [] if node in users else [node]
                users[node].append(user)
    return users


def _towards_output(node: Node, users: Mapping[Node, list[Node]], until: Collection[Node] = ()) -> set[Node]:
    """Return a node and all nodes from it to the output, or to those of `until`, which are included."""
    reached, waiting = {node}, [node]
    while waiting:
        further = [user for user in users[waiting.pop()] if user not in reached]
        reached.update(further)
        waiting += [user for user in further if user not in until]
    return reached
