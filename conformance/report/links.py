"""Links in texts: addresses, and issues of PyTorch named as `pytorch#123`."""

import re

from markupsafe import Markup, escape

_ISSUES = "https://github.com/pytorch/pytorch/issues/"
_LINK = re.compile(r"(?P<address>https?://[^\s<>\"'`|\\^{}]*[^\s<>\"'`|\\^{}.,;:!?)\]])|\bpytorch#(?P<issue>[0-9]+)\b")


def linked(text: str) -> Markup:
    """Return a text as HTML in which http addresses and `pytorch#123` are links; everything else is escaped.

    An address of an issue of PyTorch is shown as `pytorch#123`.
    """
    html, end = Markup(), 0
    for match in _LINK.finditer(text):
        html += escape(text[end : match.start()]) + _link(match["address"] or _ISSUES + match["issue"])
        end = match.end()
    return html + escape(text[end:])


def _link(address: str) -> Markup:
    number = address.removeprefix(_ISSUES)
    shown = f"pytorch#{number}" if number.isdigit() else address
    return Markup('<a href="{}" rel="noreferrer">{}</a>').format(address, shown)
