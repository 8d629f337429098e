"""Needs of a person who reads a page, computed in the browser: contrast of its texts, no text beyond the window."""

from tests.support.browser import Browser

MIN_CONTRAST, MIN_CONTRAST_OF_LARGE = 4.5, 3.0
"""Contrast of text and background that WCAG 2.2 asks for (1.4.3, level AA)."""
LARGE_PX, LARGE_BOLD_PX = 24, 18.66
OPEN = "for (const each of document.querySelectorAll('details')) each.open = true;"
TEXTS = """
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), texts = [];
while (walker.nextNode()) {
  const { nodeValue, parentElement: box } = walker.currentNode;
  if (nodeValue.trim() && box.checkVisibility({ visibilityProperty: true })) texts.push(walker.currentNode);
}
"""
LOW_CONTRAST = (
    TEXTS
    + """
const [least, leastOfLarge, large, largeBold] = arguments;
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const parsed = new Map();
function rgba(colour) {
  if (!parsed.has(colour)) {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    parsed.set(colour, [r, g, b, a / 255]);
  }
  return parsed.get(colour);
}
const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => a * value + (1 - a) * below[i]);
const backgrounds = new Map();
function background(box) {
  if (!box) return rgba("Canvas").slice(0, 3);
  if (!backgrounds.has(box))
    backgrounds.set(box, over(rgba(getComputedStyle(box).backgroundColor), background(box.parentElement)));
  return backgrounds.get(box);
}
const linear = value => value <= 10.31475 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4;
const luminance = rgb => rgb.map(linear).reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
const found = new Map();
for (const { nodeValue, parentElement: box } of texts) {
  const style = getComputedStyle(box), size = parseFloat(style.fontSize), below = background(box);
  const isLarge = size >= large || (size >= largeBold && Number(style.fontWeight) >= 600);
  const [a, b] = [luminance(over(rgba(style.color), below)), luminance(below)].sort((x, y) => y - x);
  const contrast = (a + 0.05) / (b + 0.05);
  if (contrast < (isLarge ? leastOfLarge : least))
    found.set(`${box.tagName}.${box.className}`, `${contrast.toFixed(2)}: ${nodeValue.trim().slice(0, 60)}`);
}
return [...found].map(([name, text]) => `${name} ${text}`);
"""
)
BEYOND = (
    TEXTS
    + """
const width = document.documentElement.clientWidth, bars = ["auto", "scroll"];
const scrolls = box => box && (bars.includes(getComputedStyle(box).overflowX) || scrolls(box.parentElement));
const found = texts.filter(text => {
  const range = document.createRange();
  range.selectNodeContents(text);
  return range.getBoundingClientRect().right > width + 1 && !scrolls(text.parentElement);
});
const wider = document.documentElement.scrollWidth > width ? ["the page is wider than the window"] : [];
return [...wider, ...found.map(text => text.nodeValue.trim().slice(0, 60))];
"""
)


def texts_of_low_contrast(window: Browser) -> list[str]:
    """Return the elements with a text, of all that are not folded, that WCAG calls too faint, one of each class."""
    found: list[str] = window.run(LOW_CONTRAST, MIN_CONTRAST, MIN_CONTRAST_OF_LARGE, LARGE_PX, LARGE_BOLD_PX)
    return found


def texts_beyond_the_window(window: Browser) -> list[str]:
    """Return the texts that end beyond the right border of the window and that no bar scrolls to."""
    found: list[str] = window.run(BEYOND)
    return found
