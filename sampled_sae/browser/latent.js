// One latent: what is known of it, from the chunk that holds it.
const BEFORE = 18, AFTER = 10;  // tokens shown around the one that a context is shown for
const TOP = -1;  // the band of the top contexts, as it comes out of its column

const section = (title, note, ...children) => make("section", {}, make("h3", {}, title), note ? make("p", {class: "note"}, note) : null, ...children);

function fact(name, value, meaning) {
  return value === "" ? null : make("div", {}, explained(make("dt", {}, name), meaning), make("dd", {}, value));
}

async function latentView(latent) {
  const {columns, row, scores, unique, otherText} = await chunkOf(latent);
  const windows = [];
  for (let w = columns.windows[row]; w < columns.windows[row + 1]; w++) windows.push(windowOf(columns, w));
  await Promise.all(windows.map(async window => { window.words = await contextTokens(window.context); }));
  const maximum = book.columns.maximum[latent], fires = book.columns.fired[latent] > 0;
  return [
    headOf(latent),
    facts(latent, scores[latent] ?? {}, unique?.[latent]),
    fires ? firesOn(latent, columns, row) : make("p", {class: "notes"}, `It is dead here: it fires on none of the ${whole(book.about.read)} tokens read.`),
    fires ? topContexts(windows.filter(window => window.band === TOP), maximum) : null,
    fires ? histogramOf(columns, row, maximum) : null,
    fires ? drawnContexts(windows.filter(window => window.band !== TOP), maximum) : null,
    columns.promoted?.length ? outputOf(columns, row) : null,
    fires && columns.together.length ? firesWith(latent, columns, row) : null,
    columns.near.length ? nearestHere(columns, row) : null,
    columns.other?.length ? nearestThere(columns, row, otherText) : null,
    columns.both && fires ? await sideBySide(latent, columns, row, windows) : null,
  ].filter(node => node);
}

function windowOf(columns, w) {
  const begin = columns.firings[w], end = columns.firings[w + 1], values = new Map();
  for (let i = begin; i < end; i++) values.set(columns.position[i], columns.value[i]);
  return {number: w, band: columns.band[w], context: columns.context[w], center: columns.center[w], values};
}

function headOf(latent) {
  const said = explanation(latent);
  const step = (text, label, steps) => make("button", {type: "button", "aria-label": label, title: label, onclick: () => move(steps)}, text);
  return make("header", {}, make("div", {class: "line"}, make("h2", {}, `Latent ${latent}`),
    make("nav", {}, step("‹", "Previous latent", -1), step("›", "Next latent", 1), make("a", {href: "#about", class: "close", title: "Close (Esc)"}, "Close"))),
  make("p", {class: said ? "said" : "said note"}, said ?? "It has no explanation yet."));
}

function facts(latent, scores, unique) {
  const {density, score, near, unique: alone, fired, maximum} = book.columns;
  const meanings = book.about.meanings, named = name => Object.hasOwn(meanings, name) ? meanings[name] : "A score of its explanation.";
  const others = Object.entries(scores).map(([name, value]) => fact(name[0].toUpperCase() + name.slice(1), fixed(value), named(name)));
  if (score && book.about.score.head === "Gain") others.unshift(fact("Gain", fixed(score[latent]), book.about.score.meaning));
  const rate = density[latent] > 0 ? `${share(density[latent])}, 1 in ${whole(Math.round(1 / density[latent]))}` : "0";
  const items = [
    fact("Density", rate, `Share of ${whole(book.about.densityTokens)} tokens at which it fires.`),
    fact("Fires here", `${whole(fired[latent])} of ${whole(book.about.read)}`, "Tokens of the text that was read for this page."),
    fact("Largest activation", short(maximum[latent]), "Largest activation in the text that was read for this page, in the units of the model's activations."),
    ...(others.length || !score ? others : [fact(book.about.score.head, fixed(score[latent]), book.about.score.meaning)]),
    fact("Nearest in this SAE", fixed(near[latent]), "Largest decoder cosine with another latent of this SAE; near 1 is a duplicate."),
    alone ? fact("Uniqueness", fixed(alone[latent]), `1 minus the largest decoder cosine with any latent of ${book.about.other}; near 0 it is there too.`) : null,
  ];
  return make("div", {}, make("dl", {class: "facts"}, ...items), unique ? uniqueNote(unique) : null);
}

const uniqueNote = item => make("p", {class: "notes"},
  (item.nearest == null ? `Compared with the explained latents of ${item.against} alone: ` :
    `One of the most unique against ${item.against}, where no decoder row has a larger cosine with it than ${fixed(item.nearest)}: `) +
  `its best explained match there, latent ${item.match} (${item.match_text}), has a similarity of ` +
  `${fixed(item.overall)} (decoder ${fixed(item.decoder)}, explanation ${fixed(item.text)}).`);

function firesOn(latent, columns, row) {
  const shares = part(columns.shares, row, book.tokensKept);
  const items = topTokens(latent).map((word, i) => make("li", {}, chip(word), make("small", {}, `${Math.round(100 * shares[i])}%`)));
  return section("Top tokens", "With their share of the sum of its activations.", make("ul", {class: "chips"}, ...items));
}

function histogramOf(columns, row, maximum) {
  const counts = [...part(columns.histogram, row, book.bins)], edge = i => short((i * maximum) / book.bins);
  const labels = [0, 0.25, 0.5, 0.75, 1].map(at => [at, short(at * maximum)]);
  const total = counts.reduce((a, b) => a + b, 0), low = counts.slice(0, Math.ceil(counts.length / 2)).reduce((a, b) => a + b, 0);
  const what = `Histogram of ${whole(total)} activations up to ${short(maximum)}`;
  return section("Activation histogram", `Heights are logarithms of counts. ${Math.round((100 * low) / total)}% lie in the lower half.`,
    make("figure", {}, bars(counts, edge, what, labels)));
}

function outputOf(columns, row) {
  const side = (name, title) => {
    const width = columns[name].length / (columns.windows.length - 1), words = part(columns[name], row, width), by = part(columns[`${name}By`], row, width);
    const most = Math.max(...[...columns.promotedBy.subarray(row * width, (row + 1) * width), ...columns.suppressedBy.subarray(row * width, (row + 1) * width)].map(Math.abs));
    const items = [...words].map((word, i) => make("li", {class: name, "--part": Math.abs(by[i]) / most}, chip(word), make("small", {}, `${by[i] < 0 ? "−" : "+"}${short(Math.abs(by[i]))}`)));
    return make("div", {}, make("h4", {}, title), make("ol", {class: "effects"}, ...items));
  };
  return section("Direct effect on the output", "Its decoder row through the final norm's weight and the unembedding, without the later layers.",
    make("div", {class: "pair"}, side("promoted", "Promotes"), side("suppressed", "Suppresses")));
}

// ---- contexts ----

const topContexts = (windows, maximum) => section("Top activations",
  "The contexts of its largest activations, one position in each. Click a line to show its whole context.", contextList(windows, maximum));

function drawnContexts(windows, maximum) {
  if (!windows.length) return section("Activations across the range", "All contexts in which it fires are shown above.");
  const bands = book.about.bands, groups = [];
  for (let band = bands - 1; band >= 0; band--) {
    const some = windows.filter(window => window.band === band);
    if (!some.length) continue;
    const range = `${Math.round((100 * band) / bands)} to ${Math.round((100 * (band + 1)) / bands)}% of the largest`;
    groups.push(make("h4", {}, range), contextList(some, maximum));
  }
  return section("Activations across the range", "Random samples of the other contexts in which it fires, the strongest first.", ...groups);
}

const contextList = (windows, maximum) => make("ol", {class: "contexts"}, ...windows.map(window => contextLine(window, maximum)));

// `window.also`: positions at which another latent fires too, if there is one to compare with.
function contextLine(window, maximum) {
  const text = make("span", {class: "context", dir: "ltr"}), value = short(window.values.get(window.center));
  const button = make("button", {type: "button", "aria-expanded": "false", title: "Show the whole context"}, value);
  const line = make("li", {}, button, text);
  const fill = all => text.replaceChildren(...shaded(window, maximum, all));
  line.addEventListener("click", () => {
    if (getSelection().toString()) return;
    const open = button.getAttribute("aria-expanded") === "false";
    button.setAttribute("aria-expanded", String(open));
    fill(open);
  });
  fill(false);
  return line;
}

function shaded({words, values, center, also}, maximum, all) {
  const from = all ? 0 : center - BEFORE, to = all ? words.length : center + AFTER + 1, nodes = [];
  for (const piece of pieces(words)) {
    if (piece.to <= from || piece.from >= to) continue;
    let value = 0;
    for (let i = piece.from; i < piece.to; i++) value = Math.max(value, values.get(i) ?? 0);
    const marked = center >= piece.from && center < piece.to;
    let both = false;
    for (let i = piece.from; i < piece.to; i++) both ||= also?.has(i) ?? false;
    if (!value) nodes.push(make("span", {class: both ? "also" : undefined}, piece.text));
    else nodes.push(make(marked ? "mark" : "span", {class: both ? "hot also" : "hot", "--heat-part": (value / maximum).toFixed(3), title: `“${piece.text}”: ${short(value)}`}, piece.text));
  }
  return [from > 0 ? "…" : "", ...nodes, to < words.length ? "…" : ""];
}

// ---- neighbors ----

function nearestHere(columns, row) {
  const width = columns.near.length / (columns.windows.length - 1), near = part(columns.near, row, width), cosine = part(columns.nearCosine, row, width);
  const items = [...near].map((latent, i) => latent < 0 ? null : neighbor(cosine[i], link(latent), book.columns.fired[latent] ? topTokens(latent) : null, explanation(latent)));
  const note = items.some(item => item) ? "By the cosine of decoder rows." : "Its decoder row is zero, so it has no direction.";
  return section("Nearest latents in this SAE", note, make("ol", {class: "neighbors"}, ...items));
}

function firesWith(latent, columns, row) {
  const width = columns.together.length / (columns.windows.length - 1), at = part(columns.togetherAt, row, width), by = part(columns.togetherBy, row, width);
  const items = [...part(columns.together, row, width)].map((other, i) => other < 0 ? null :
    neighbor(by[i], link(other), topTokens(other), explanation(other), `at ${Math.round((100 * at[i]) / book.columns.fired[latent])}% of its tokens`));
  const none = items.every(item => !item);
  return section("Coactivating latents", none ? "No other latent fires at three of its tokens or more." : "By the correlation of firing over the tokens read, and at what share of this latent's tokens each fires too.",
    make("ol", {class: "neighbors"}, ...items));
}

function nearestThere(columns, row, otherText) {
  const width = columns.other.length / (columns.windows.length - 1), kept = book.tokensKept, known = columns.otherTokens;
  const items = [...part(columns.other, row, width)].map((latent, i) => {
    if (latent < 0) return null;
    const at = row * width + i, words = known ? [...part(known, at, kept)].filter(word => word >= 0) : [];
    return neighbor(columns.otherCosine[at], make("span", {class: "number"}, `#${latent}`), known && !columns.otherFired[at] ? null : words, otherText?.[latent]);
  });
  return section(`Nearest latents in ${book.about.other}`, "By the cosine of decoder rows.", make("ol", {class: "neighbors"}, ...items));
}

// `words`: what it fires on; null for a latent that does not fire in this text.
function neighbor(cosine, name, words, said, note) {
  const shown = words === null ? [make("i", {}, "dead here")] : words.slice(0, 4).flatMap(word => [chip(word), " "]);
  return make("li", {}, make("b", {}, fixed(cosine)), name, make("span", {class: "about"}, make("span", {}, ...shown), note ? make("small", {}, note) : null, said ? make("span", {class: "text"}, said) : null));
}
