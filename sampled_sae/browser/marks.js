// Small pieces of the page. Text becomes text nodes only, never HTML.
function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

function draw(tag, options = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(options)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// The node with what it means, which tips.js shows on hover, focus and tap.
function explained(node, meaning) {
  if (!meaning) return node;
  node.dataset.tip = meaning;
  if (!node.matches("button, a")) node.tabIndex = 0;
  return node;
}

const whole = value => value.toLocaleString("en-US");
const short = value => !Number.isFinite(value) ? "" : value === 0 ? "0" : Math.abs(value) >= 1000 ? whole(Math.round(value)) : value.toPrecision(3);
const share = value => value === 0 ? "0" : value >= 1e-8 ? `${Number((100 * value).toPrecision(2))}%` : `${value.toExponential(1)}`;
const fixed = value => Number.isFinite(value) ? value.toFixed(2) : "";

const chip = (word, options = {}) => make("span", {class: "token", title: `token “${book.words[word]}”`, ...options}, book.words[word]);

const link = latent => make("a", {href: `#latent=${latent}`, class: "number"}, `#${latent}`);

const explanation = latent => book.explanations.get(latent);

// Bars over equal bins; heights by the logarithm of the counts. `edge(i)` describes where bin i begins.
function bars(counts, edge, what, labels) {
  // As wide as it will be, so that its text is neither stretched nor shrunk.
  // A view that is hidden has no width; it is drawn anew when it is shown.
  const width = Math.min(736, (view.clientWidth || innerWidth) - 2 * parseFloat(getComputedStyle(view).paddingLeft));
  const height = 120, room = 18, most = Math.max(...counts);
  const scale = count => count ? Math.max(2, (height * Math.log10(1 + count)) / Math.log10(1 + most)) : 0;
  const step = width / counts.length, picture = draw("svg", {viewBox: `0 0 ${width} ${height + room}`, role: "img", "aria-label": what});
  counts.forEach((count, i) => {
    const said = `${edge(i)} to ${edge(i + 1)}: ${whole(count)}`;
    const tall = scale(count);
    // The whole height of the bin is its target for the mouse.
    picture.append(draw("g", {}, draw("title", {}, said),
      draw("rect", {x: i * step, y: 0, width: step, height, class: "target"}),
      draw("rect", {x: i * step + 0.75, y: height - tall, width: step - 1.5, height: tall, class: "bar"})));
  });
  picture.append(draw("line", {x1: 0, x2: width, y1: height + 0.5, y2: height + 0.5, class: "axis"}));
  for (const [at, text] of labels) {
    const anchor = at <= 0 ? "start" : at >= 1 ? "end" : "middle";
    picture.append(draw("text", {x: at * width, y: height + 14, "text-anchor": anchor}, text));
  }
  return picture;
}

// Tokens that hold part of a character, such as an emoji, are shown together as that character where they make one.
function pieces(words) {
  const found = [];
  for (let i = 0; i < words.length; i++) {
    const group = character(words, i);
    found.push(group ?? {from: i, to: i + 1, text: book.words[words[i]]});
    i = found.at(-1).to - 1;
  }
  return found;
}

const decoder = new TextDecoder("utf-8", {fatal: true});
// Kept visible in such characters, as in all other text.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]/g;

function character(words, from) {
  const bytes = [];
  for (let to = from; to < words.length && to < from + 8; to++) {
    const more = book.bytes.get(words[to]);
    if (!more) return null;
    bytes.push(...more);
    try {
      const text = decoder.decode(new Uint8Array(bytes)).replaceAll("\n", "↵");
      return {from, to: to + 1, text: text.replace(HIDDEN, sign => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`)};
    } catch { /* not whole yet */ }
  }
  return null;
}
