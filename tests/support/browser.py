"""Headless browsers, driven by WebDriver's commands (https://www.w3.org/TR/webdriver2/) without another library.

Chromium and Chrome take the commands from their chromedriver over HTTP, Firefox takes them itself, by its protocol
Marionette over a socket: no geckodriver is needed, which Debian does not have.
"""

import base64
import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

CHROMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FIREFOXES = ("firefox", "firefox-esr")
CHROME, FIREFOX = (next(filter(None, map(shutil.which, names)), None) for names in (CHROMES, FIREFOXES))
DRIVER = shutil.which("chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars")
PORT = re.compile(r"started successfully on port (\d+)")
HEIGHT = 900
START_S = 60
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
CHROME_PATHS = {
    "Navigate": ("POST", "/url"),
    "ExecuteScript": ("POST", "/execute/sync"),
    "FindElement": ("POST", "/element"),
    "ElementClick": ("POST", "/element/{id}/click"),
    "PerformActions": ("POST", "/actions"),
    "TakeScreenshot": ("GET", "/screenshot"),
    "DeleteSession": ("DELETE", ""),
}
"""Method and path over HTTP of the commands, as Firefox calls them."""
FIREFOX_WINDOW = """
const [width, height, dark] = arguments, { style } = gBrowser.selectedBrowser;
for (const end of ["min", "max"]) { style[end + "Width"] = width + "px"; style[end + "Height"] = height + "px"; }
Services.prefs.setIntPref("layout.css.prefers-color-scheme.content-override", dark ? 0 : 1);
Services.console.reset();
"""
FIREFOX_ERRORS = """
const errors = Services.console.getMessageArray().filter(message => message instanceof Ci.nsIScriptError);
const severe = errors.filter(error => !(error.flags & Ci.nsIScriptError.warningFlag));
return severe.filter(error => error.sourceName.startsWith("file:")).map(error => error.errorMessage);
"""


class BrowserUnavailableError(RuntimeError):
    """The browser or the driver that is installed does not start on this machine: a sandbox may forbid it."""


class Browser(ABC):
    """Session of a browser with one window."""

    @abstractmethod
    def command(self, name: str, **parameters: object) -> Any:
        """Return the value of a command of WebDriver."""

    @abstractmethod
    def resize(self, width: int, height: int, *, dark: bool) -> None:
        """Give the page this size in CSS pixels, one pixel each, and a person who prefers dark or light pages."""

    @abstractmethod
    def errors(self) -> list[str]:
        """Return the errors in the console since the last page was opened."""

    def open(self, file: Path, *, width: int, height: int = HEIGHT, dark: bool = False, hash_: str = "") -> Self:
        """Open a file."""
        self.command("Navigate", url="about:blank")
        self.resize(width, height, dark=dark)
        self.command("Navigate", url=file.as_uri() + hash_)
        return self

    def run(self, script: str, *arguments: object) -> Any:
        """Return the result of a script."""
        return self.command("ExecuteScript", script=script, args=arguments)

    def visible(self, selector: str) -> list[str]:
        """Return the texts of the elements that a person sees in the window."""
        texts: list[str] = self.run(VISIBLE, selector)
        return texts

    def scroll_to(self, selector: str) -> None:
        """Scroll to the first element of a selector."""
        self.run("document.querySelector(arguments[0]).scrollIntoView()", selector)

    def click(self, selector: str) -> None:
        """Click on the middle of the first element of a selector, as a person does; fails where that is covered."""
        element = self.command("FindElement", using="css selector", value=selector)
        self.command("ElementClick", id=next(iter(element.values())))

    def press(self, keys: str) -> None:
        """Press keys where the focus is."""
        actions = [{"type": step, "value": key} for key in keys for step in ("keyDown", "keyUp")]
        self.command("PerformActions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def screenshot(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self.command("TakeScreenshot", full=False))


class Chrome(Browser):
    """Session of Chromium or Chrome."""

    def __init__(self, address: str, profile: str) -> None:
        options = {"binary": CHROME, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "SEVERE"}}
        started = _answer("POST", f"{address}/session", {"capabilities": {"alwaysMatch": always}})
        self._session = f"{address}/session/{started['sessionId']}"

    def command(self, name: str, **parameters: object) -> Any:
        method, path = CHROME_PATHS[name]
        return _answer(method, self._session + path.format_map(parameters), parameters)

    def resize(self, width: int, height: int, *, dark: bool) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.errors()

    def errors(self) -> list[str]:
        return [entry["message"] for entry in _answer("POST", f"{self._session}/se/log", {"type": "browser"})]

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(self._devtools("Page.printToPDF", preferCSSPageSize=True)["data"])

    def _devtools(self, command: str, **parameters: object) -> Any:
        return _answer("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})


class Firefox(Browser):
    """Session of Firefox."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=START_S)
        self._answers = self._socket.makefile("rb")
        self._receive()  # its greeting
        self.command("NewSession")

    def command(self, name: str, **parameters: object) -> Any:
        scope = "Marionette" if name == "SetContext" else "WebDriver"
        message = json.dumps([0, 0, f"{scope}:{name}", parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(message), message))
        _, _, error, result = self._receive()
        if error:
            raise RuntimeError(f"{name}: {error['message']}")
        return result.get("value", result)

    def resize(self, width: int, height: int, *, dark: bool) -> None:
        self._run_outside(FIREFOX_WINDOW, width, height, dark)

    def errors(self) -> list[str]:
        messages: list[str] = self._run_outside(FIREFOX_ERRORS)
        return messages

    def _run_outside(self, script: str, *arguments: object) -> Any:
        """Return the result of a script in the browser itself, not in the page."""
        self.command("SetContext", value="chrome")
        try:
            return self.run(script, *arguments)
        finally:
            self.command("SetContext", value="content")

    def _receive(self) -> Any:
        """Return a message, before which its length stands: `5:[1,2]`."""
        length = b""
        while (byte := self._answers.read(1)) != b":":
            if not byte:
                raise ConnectionError("Firefox has closed its connection")
            length += byte
        return json.loads(self._answers.read(int(length)))


def _answer(method: str, address: str, body: object) -> Any:
    data = json.dumps(body).encode() if method == "POST" else None
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data=data, method=method), timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{method} {address}: {json.load(error)['value']['message']}") from None


def _driver_address(driver: subprocess.Popen[str]) -> str:
    """Return the address at which a driver says that it listens."""
    assert driver.stdout
    said = []
    for line in driver.stdout:
        if match := PORT.search(line):
            return f"http://127.0.0.1:{match[1]}"
        said.append(line)
    raise BrowserUnavailableError(f"{DRIVER} ended with status {driver.wait()}: {''.join(said).strip()!r}")


def _marionette_port(file: Path, process: subprocess.Popen[bytes]) -> int:
    """Return the port that Firefox writes to a file of its profile."""
    deadline = time.monotonic() + START_S
    while not (file.exists() and file.read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise BrowserUnavailableError(f"{FIREFOX} has ended with status {process.poll()}, or does not answer")
        time.sleep(0.1)
    return int(file.read_text())


@contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """End a process, and wait for it."""
    with process:
        try:
            yield
        finally:
            process.terminate()


@contextmanager
def chrome() -> Iterator[Chrome]:
    """Start Chromium or Chrome with an empty profile, and end it.

    Raises:
        BrowserUnavailableError: the driver or the browser does not start; the text is what they say.

    """
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as profile:
        driver = subprocess.Popen([str(DRIVER), "--port=0"], stdout=pipe, stderr=subprocess.STDOUT, text=True)
        with _ended(driver):
            address = _driver_address(driver)
            try:
                session = Chrome(address, profile)
            except (RuntimeError, OSError) as error:
                raise BrowserUnavailableError(str(error)) from error
            try:
                yield session
            finally:
                session.command("DeleteSession")


@contextmanager
def firefox() -> Iterator[Firefox]:
    """Start Firefox with an empty profile, and end it.

    Raises:
        BrowserUnavailableError: it does not start.

    """
    silent = subprocess.DEVNULL
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        Path(profile, "user.js").write_text('user_pref("marionette.port", 0);\n')
        options = ("--headless", "--marionette", "--remote-allow-system-access", "--profile", profile)
        process = subprocess.Popen([str(FIREFOX), *options], stdout=silent, stderr=silent)
        with _ended(process):
            yield Firefox(_marionette_port(Path(profile, "MarionetteActivePort"), process))


BROWSERS: dict[str, Callable[[], AbstractContextManager[Browser]]] = {
    **({"chrome": chrome} if CHROME and DRIVER else {}),
    **({"firefox": firefox} if FIREFOX else {}),
}
"""Browsers that are installed."""
