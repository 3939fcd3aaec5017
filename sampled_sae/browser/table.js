// The list of all latents: searched, sorted, and only those rows made that are in sight.
const list = document.getElementById("rows"), inner = document.getElementById("all"), heads = document.getElementById("heads");
const state = {order: new Uint32Array(0), by: "density", down: true, chosen: -1};  // the chosen latent, -1 for none
let columns = [];

// What can be sorted by; those with a head are columns of the table. `down`: whether the largest come first at first.
function possibleColumns() {
  const about = book.about, other = about.other ?? "the other SAE";
  return [
    {key: "latent", head: "Latent", title: "number", down: false, meaning: "Number of the latent in the SAE, from 0."},
    {key: "density", head: "Density", title: "density", down: true, show: share, meaning: `Share of ${whole(about.densityTokens)} tokens at which it fires.`},
    {key: "score", head: about.score?.head, title: about.score?.head.toLowerCase(), down: true, show: fixed, meaning: about.score?.meaning},
    {key: "near", head: "Nearest", title: "nearest in this SAE", down: true, show: fixed, meaning: "Largest decoder cosine with another latent of this SAE; near 1 is a duplicate."},
    {key: "unique", head: "Unique", title: "uniqueness", down: true, show: fixed, meaning: `1 minus the largest decoder cosine with any latent of ${other}; near 0 it is there too.`},
    {key: "listed", title: "uniqueness with explanations", down: true, meaning: "By sampled-sae compare: decoder rows and explanations"},
    {key: "maximum", title: "largest activation", down: true},
  ].filter(column => column.key === "latent" || book.columns[column.key]);
}

function fillHeads() {
  columns = possibleColumns();
  for (const {key, title} of columns) document.getElementById("sort").append(make("option", {value: key}, title));
  for (const column of columns.filter(column => column.head)) {
    heads.append(explained(make("button", {type: "button", class: column.key, onclick: () => sortBy(column.key)}, column.head), column.meaning));
  }
  heads.append(make("span", {class: "top"}, "Fires on"), make("span", {class: "text"}, book.explanations.size ? "Explanation" : ""));
  heads.dataset.columns = inner.dataset.columns = columns.filter(column => column.head).map(column => column.key).join(" ");
  list.style.setProperty("--numbers", columns.filter(column => column.head).length);
  heads.style.setProperty("--numbers", columns.filter(column => column.head).length);
}

function sortBy(key, down) {
  const column = columns.find(column => column.key === key);
  state.down = down ?? (state.by === key ? !state.down : column.down);
  state.by = key;
  showOrder();
  refresh();
}

function showOrder() {
  document.getElementById("sort").value = state.by;
  const turn = document.getElementById("turn");
  turn.textContent = state.down ? "↓" : "↑";
  turn.title = state.down ? "Largest first; click to reverse" : "Smallest first; click to reverse";
  for (const button of heads.querySelectorAll("button")) {
    const on = button.classList.contains(state.by);
    button.dataset.order = on ? (state.down ? "down" : "up") : "";
    button.setAttribute("aria-pressed", on);
  }
}

// ---- searching ----

let lowered = null;  // explanations in small letters, made at the first search

function wordTest(word, scope) {
  const tests = [];
  if (scope !== "tokens") {
    lowered ??= new Map([...book.explanations].map(([latent, text]) => [latent, text.toLowerCase()]));
    const bare = word.replace(/\*$/, "");
    tests.push(latent => lowered.get(latent)?.includes(bare) ?? false);
  }
  if (scope !== "text") {
    const prefix = word.endsWith("*") && word.length > 1 ? word.slice(0, -1) : null;
    const hit = new Uint8Array(book.words.length);
    book.words.forEach((text, i) => {
      const bare = text.trim().toLowerCase();
      hit[i] = prefix === null ? bare === word : bare.startsWith(prefix);
    });
    const tokens = book.columns.tokens, kept = book.tokensKept;
    tests.push(latent => {
      for (let i = latent * kept; i < (latent + 1) * kept && tokens[i] >= 0; i++) if (hit[tokens[i]]) return true;
      return false;
    });
  }
  return latent => tests.some(test => test(latent));
}

// Every word must be found, in the explanation or among the tokens.
function search() {
  const query = document.getElementById("query").value.trim().toLowerCase();
  const scope = document.getElementById("scope").value, silent = document.getElementById("silent").checked;
  const number = /^#(\d+)$/.exec(query);
  if (number) return Number(number[1]) < book.latents ? [Number(number[1])] : [];
  const tests = query ? query.split(/\s+/).map(word => wordTest(word, scope)) : [];
  const found = [];
  for (let latent = 0; latent < book.latents; latent++) {
    if ((silent || book.columns.fired[latent] > 0) && tests.every(test => test(latent))) found.push(latent);
  }
  return found;
}

function refresh() {
  const found = search(), values = book.columns[state.by], sign = state.down ? -1 : 1;
  const order = Uint32Array.from(found);
  if (!values) order.sort((a, b) => sign * (a - b));
  // What has no number comes last, whichever way round.
  else order.sort((a, b) => Number.isNaN(values[a]) - Number.isNaN(values[b]) || sign * (values[a] - values[b]) || a - b);
  state.order = order;
  const searched = document.getElementById("query").value.trim() !== "";
  document.getElementById("count").textContent = `${whole(order.length)} of ${whole(book.latents)} latents`;
  const none = document.getElementById("none");
  none.hidden = order.length > 0;
  none.textContent = searched ? "No latent matches: every word must be in its explanation or among its tokens." : "No latent fires.";
  list.scrollTop = 0;
  reveal();
  showRows();
}

// ---- rows ----

// In pixels, out of the style's rem.
const rowHeight = () => parseFloat(getComputedStyle(list).getPropertyValue("--row")) * parseFloat(getComputedStyle(document.documentElement).fontSize);

function showRows() {
  const height = rowHeight(), first = Math.max(0, Math.floor(list.scrollTop / height) - 8);
  const last = Math.min(state.order.length, first + Math.ceil(list.clientHeight / height) + 16);
  inner.style.height = `${state.order.length * height}px`;
  const rows = [];
  for (let i = first; i < last; i++) rows.push(row(state.order[i], i, height));
  inner.replaceChildren(...rows);
  const there = state.chosen >= 0 && document.getElementById(`row-${state.chosen}`);
  there ? list.setAttribute("aria-activedescendant", there.id) : list.removeAttribute("aria-activedescendant");
}

function row(latent, place, height) {
  const [first, ...others] = topTokens(latent), said = explanation(latent);
  const cells = columns.filter(column => column.head).map(column => make("span", {class: column.key},
    column.key === "latent" ? String(latent) : column.show(book.columns[column.key][latent])));
  const rest = others.slice(0, 5).flatMap(word => [chip(word), " "]);
  return make("div", {
    id: `row-${latent}`, class: "row", role: "option", "aria-selected": String(latent === state.chosen), "--top": `${place * height}px`,
    "aria-posinset": place + 1, "aria-setsize": state.order.length, onclick: () => go(latent),
  }, ...cells, make("span", {class: "top"}, first === undefined ? make("i", {}, "dead") : chip(first)),
  make("span", {class: said ? "text" : "text rest", title: said}, ...(said ? [said] : rest)));
}

const placeOf = latent => state.order.indexOf(latent);

// Bring the chosen latent into sight, if it is in the list.
function reveal() {
  const place = placeOf(state.chosen), height = rowHeight();
  if (place < 0) return;
  if (place * height < list.scrollTop) list.scrollTop = place * height;
  else if ((place + 1) * height > list.scrollTop + list.clientHeight) list.scrollTop = (place + 1) * height - list.clientHeight;
}

function move(steps) {
  if (!state.order.length) return;
  const place = placeOf(state.chosen), last = state.order.length - 1;
  // With none chosen, the first step is to the first.
  const next = place < 0 && steps !== Infinity ? 0 : Math.min(last, Math.max(0, place + steps));
  go(state.order[next], true);
}
