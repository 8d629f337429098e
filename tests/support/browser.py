"""Headless browser, driven by WebDriver's protocol (https://www.w3.org/TR/webdriver2/) without another library.

`python -m tests.support.browser REPORT.html PICTURE.png WIDTH` takes the pictures of docs/.
"""

import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

CHROMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, CHROMES)), None)
DRIVER = shutil.which("chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars")
PORT = re.compile(r"started successfully on port (\d+)")
HEIGHT = 900
VISIBLE = """
const seen = element => {
  const { left, top, width, height } = element.getBoundingClientRect();
  const at = document.elementFromPoint(left + width / 2, top + height / 2);
  const uncovered = at !== null && (element.contains(at) || at.contains(element));
  return element.checkVisibility() && width > 0 && height > 0 && uncovered;
};
return [...document.querySelectorAll(arguments[0])].filter(seen).map(element => element.textContent.trim());
"""
"""Texts of those elements of a selector whose middle a person sees in the window: neither hidden nor covered."""


class BrowserUnavailableError(RuntimeError):
    """The browser or the driver that is installed does not start on this machine: a sandbox may forbid it."""


class Browser:
    """Session of a browser with one window."""

    def __init__(self, address: str, profile: str) -> None:
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        self._session = address
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        self._session += "/session/" + self._call("POST", "/session", capabilities=capabilities)["sessionId"]

    def open(self, file: Path, *, width: int, hash_: str = "") -> Self:
        """Open a file in a window of this width, in pixels of a device with one pixel per CSS pixel."""
        metrics = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._call("POST", "/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)
        self._call("POST", "/url", url="about:blank")
        self._call("POST", "/url", url=file.as_uri() + hash_)
        return self

    def run(self, script: str, *arguments: object) -> Any:
        """Return the result of a script."""
        return self._call("POST", "/execute/sync", script=script, args=arguments)

    def visible(self, selector: str) -> list[str]:
        """Return the texts of the elements that a person sees in the window."""
        texts: list[str] = self.run(VISIBLE, selector)
        return texts

    def scroll_to(self, selector: str) -> None:
        """Scroll to the first element of a selector."""
        self.run("document.querySelector(arguments[0]).scrollIntoView()", selector)

    def click(self, selector: str) -> None:
        """Click on the middle of the first element of a selector, as a person does; fails where that is covered."""
        element = self._call("POST", "/element", using="css selector", value=selector)
        self._call("POST", f"/element/{next(iter(element.values()))}/click")

    def press(self, keys: str) -> None:
        """Press keys where the focus is."""
        actions = [{"type": step, "value": key} for key in keys for step in ("keyDown", "keyUp")]
        self._call("POST", "/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def screenshot(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def close(self) -> None:
        """End the browser."""
        self._call("DELETE", "")

    def _call(self, method: str, path: str, **body: object) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self._session + path, data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {json.load(error)['value']['message']}") from None


def _address(driver: subprocess.Popen[str]) -> str:
    """Return the address at which a driver says that it listens."""
    assert driver.stdout
    said = []
    for line in driver.stdout:
        if match := PORT.search(line):
            return f"http://127.0.0.1:{match[1]}"
        said.append(line)
    raise BrowserUnavailableError(f"{DRIVER} ended with status {driver.wait()}: {''.join(said).strip()!r}")


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser with an empty profile, and end it.

    Raises:
        BrowserUnavailableError: the driver or the browser does not start; the text is what they say.

    """
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen(
            [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as driver,
    ):
        try:
            address = _address(driver)
            try:
                session = Browser(address, profile)
            except (RuntimeError, OSError) as error:
                raise BrowserUnavailableError(str(error)) from error
            try:
                yield session
            finally:
                session.close()
        finally:
            driver.terminate()


def main() -> None:
    """Write a screenshot of the window that shows a file: the pictures of docs/ are made so."""
    file, picture, width = sys.argv[1:]
    with browser() as window:
        Path(picture).write_bytes(window.open(Path(file).resolve(), width=int(width)).screenshot())


if __name__ == "__main__":
    main()
