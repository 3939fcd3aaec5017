// Start, addresses and keys.
const view = document.getElementById("view"), query = document.getElementById("query");

function go(latent, quietly = false) {
  const address = `#latent=${latent}`;
  // Steps by key leave no trail of hundreds of pages behind.
  quietly ? location.replace(address) : (location.hash = address);
}

function address() {
  const found = /^#latent=(\d+)$/.exec(location.hash);
  return found ? Number(found[1]) : -1;
}

let turn = 0;  // what is shown is what was asked for last

async function showAddress() {
  const mine = ++turn, latent = address(), known = latent >= 0 && latent < book.latents;
  state.chosen = known ? latent : -1;
  // On a phone either the list or the view is shown.
  document.body.classList.toggle("reading", latent >= 0 || location.hash === "#about" || location.hash === "#text");
  reveal();
  showRows();
  let content;
  try {
    content = known ? await latentView(latent) : location.hash === "#text" ? await textView() : aboutView(latent >= 0 ? `There is no latent ${latent}: the numbers are 0 to ${book.latents - 1}.` : null);
  } catch (error) {
    content = [make("p", {class: "notes", role: "alert"}, error.message)];
  }
  if (mine !== turn) return;
  view.replaceChildren(make("a", {href: "#", class: "back"}, "‹ All latents"), ...content);
  view.scrollTop = 0;
  document.title = known ? `Latent ${latent} · ${book.about.title}` : book.about.title;
}

function aboutView(problem) {
  const facts = book.about.facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  const notes = book.about.notes.map(note => make("li", {}, note));
  return [
    make("header", {}, make("h2", {}, "About these latents")),
    problem ? make("p", {class: "notes", role: "alert"}, problem) : null,
    make("dl", {class: "facts"}, ...facts),
    notes.length ? make("ul", {class: "notes"}, ...notes) : null,
    densities(),
    section("Export to Neuronpedia", "The same numbers as batch files for Neuronpedia, from the command line:", make("pre", {}, "sampled-sae browse SAE --text TEXT --neuronpedia FOLDER")),
    section("Search and keys", null, make("dl", {class: "keys"}, ...[
      ["Search", "Words of an explanation, or one of a latent's top tokens. Every word must match. chem* matches a prefix; #12 is latent 12."],
      ["/", "goes to the search; Enter or ↓ from there to the list"], ["↑ ↓ or ← →", "previous and next latent"],
      ["Page ↑ ↓, Home, End", "in steps of ten, first and last"], ["Esc", "clears the search, closes a latent"],
    ].flatMap(([key, text]) => [make("dt", {}, key), make("dd", {}, text)]))),
  ].filter(node => node);
}

function densities() {
  const live = [...book.columns.density].filter(value => value > 0).map(Math.log10);
  if (!live.length) return null;
  const low = Math.min(-1, Math.floor(live.reduce((a, b) => Math.min(a, b)))), bins = -low * 8, counts = new Array(bins).fill(0);
  for (const value of live) counts[Math.min(bins - 1, Math.floor((value - low) * 8))]++;
  const edge = i => share(10 ** (low + i / 8)), labels = [];
  for (let power = low; power <= 0; power++) labels.push([(power - low) / -low, share(10 ** power)]);
  return section("Firing densities", `${whole(live.length)} latents by density; heights are logarithms of counts.`,
    make("figure", {}, bars(counts, edge, "Histogram of densities", labels)));
}

// ---- controls ----

let later;
query.addEventListener("input", () => { clearTimeout(later); later = setTimeout(refresh, 100); });
for (const name of ["scope", "silent"]) document.getElementById(name).addEventListener("change", refresh);
document.getElementById("sort").addEventListener("change", event => sortBy(event.target.value, columns.find(column => column.key === event.target.value).down));
document.getElementById("turn").addEventListener("click", () => sortBy(state.by, !state.down));
document.querySelector("form").addEventListener("submit", event => { event.preventDefault(); clearTimeout(later); refresh(); toList(); });
addEventListener("hashchange", showAddress);
new ResizeObserver(() => { reveal(); showRows(); }).observe(list);
let waiting = false;
list.addEventListener("scroll", () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; showRows(); });
});

function toList() {
  list.focus();
  if (state.order.length && placeOf(state.chosen) < 0) move(1);
}

const MOVES = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity};

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("textarea")) return;
  const typing = event.target.matches("input[type=search]"), choosing = event.target.matches("select");
  if (event.key === "Escape") {
    if (typing && query.value) { query.value = ""; refresh(); } else if (typing) query.blur(); else if (location.hash) location.hash = "";
  } else if (event.key === "/" && !typing) query.focus();
  else if (event.key === "ArrowDown" && typing) { clearTimeout(later); refresh(); toList(); }
  // In the view of a latent, the keys that go up and down scroll it.
  else if (event.key in MOVES && !typing && !choosing && (event.key === "ArrowLeft" || event.key === "ArrowRight" || !view.contains(event.target))) move(MOVES[event.key]);
  else return;
  event.preventDefault();
});

async function start() {
  try {
    const [index, words] = await Promise.all([load("index"), load("words")]);
    Object.assign(book, index, {columns: unpackAll(index.columns), words: words.text});
    for (const [word, bytes] of Object.entries(words.bytes)) book.bytes.set(Number(word), bytes);
    const texts = await load("explanations");
    unpack(texts.latent).forEach((latent, i) => book.explanations.set(latent, texts.text[i]));
    fillHeads();
    if (book.columns.score) state.by = "score";
    showOrder();
    refresh();
    await showAddress();
  } catch (error) {
    view.replaceChildren(make("p", {class: "notes", role: "alert"}, error.message));
  }
  document.body.dataset.ready = "yes";
}

start();
