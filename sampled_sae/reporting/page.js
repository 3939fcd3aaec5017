const dark = matchMedia("(prefers-color-scheme: dark)"), phone = matchMedia("(max-width: 640px)");
const drawers = [drawFigures];  // other scripts add theirs

function recolor(node, key) {
  if (typeof node === "string") return (dark.matches && /color/i.test(key) && DARK[node]) || node;
  if (Array.isArray(node)) return node.map(item => recolor(item, key));
  if (node === null || typeof node !== "object") return node;
  return Object.fromEntries(Object.entries(node).map(([name, item]) => [name, recolor(item, name)]));
}

function emphasize(trace, chosen) {
  if (!trace.meta) return trace;
  const picked = trace.meta.group === chosen;
  if (trace.meta.band) return {...trace, visible: picked};
  const line = {...trace.line, width: picked ? trace.meta.width : 1.5, dash: picked ? trace.meta.dash : "solid"};
  const faded = chosen >= 0 && !picked;
  return {...trace, line, opacity: faded ? 0.12 : picked ? 1 : 0.8, hoverinfo: faded ? "skip" : "all"};
}

function drawInto(id, data, layout) {
  if (phone.matches) layout.dragmode = false;  // a finger on a picture scrolls the page
  Plotly.react(id, recolor(data), recolor(layout), {displayModeBar: false, responsive: true});
}

// What a control speaks for: its part of a page that has several, else all of it.
const scope = node => node.closest("[data-scope]") ?? document.body;

function drawFigures() {
  for (const script of document.querySelectorAll("script[data-figure]")) {
    if (script.closest("[hidden]")) continue;
    const {data, layout} = JSON.parse(script.textContent);
    const chosen = Number(scope(script).querySelector(".picker input:checked")?.value ?? -1);  // the group; -1 is all
    drawInto(script.dataset.figure, data.map(trace => emphasize(trace, chosen)), layout);
  }
}

const draw = () => drawers.forEach(show => show());

function choose(select) {
  const name = CSS.escape(select.dataset.choose);
  for (const part of document.querySelectorAll(`[data-chosen-by="${name}"]`)) part.hidden = part.dataset.value !== select.value;
}

function sortBy(head) {
  const table = head.closest("table"), rows = [...table.tBodies[0].rows], column = head.cellIndex;
  const down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : column > 0;
  const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const missing = row => value(row) === "";
  const order = (a, b) => column ? a - b : a.localeCompare(b, "en", {numeric: true});
  rows.sort((a, b) => missing(a) - missing(b) || (down ? order(value(b), value(a)) : order(value(a), value(b))));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  table.tBodies[0].append(...rows);
}

document.querySelectorAll("th button").forEach(button => button.onclick = () => sortBy(button.parentElement));
document.querySelectorAll(".picker input").forEach(input => input.onchange = () => {
  scope(input).querySelectorAll("[data-group]").forEach(key => key.hidden = key.dataset.group !== input.value);
  draw();
});
document.querySelectorAll("[data-choose]").forEach(select => {
  select.onchange = () => { choose(select); draw(); };
  choose(select);
});
dark.onchange = phone.onchange = draw;
document.addEventListener("DOMContentLoaded", draw);
