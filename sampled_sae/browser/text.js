// A text with the latents that fire at each of its tokens: samples of the text that was read or, from a server with the
// model, the reader's own.
const SERVED = "served" in document.documentElement.dataset;
const reading = {tokens: [], name: "", at: -1, latent: -1, text: ""};  // what is shown; the chosen token and latent, -1 for none

async function sample(number) {
  const [, length, kept] = book.samples, {latent, value} = await samples(), words = await contextTokens(number);
  const tokens = [...words].map((word, i) => {
    const own = part(latent, number * length + i, kept), values = part(value, number * length + i, kept);
    return {text: book.words[word], latents: [...own].map((one, j) => [one, values[j]]).filter(([one]) => one >= 0)};
  });
  Object.assign(reading, {tokens, name: `Sample ${number + 1}`, at: -1, latent: -1});
}

let kept = null;
const samples = async () => (kept ??= unpackAll(await load("samples")));

async function run(text) {
  const answer = await fetch("/read", {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify({text})});
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  const tokens = found.text.map((word, i) => ({text: word, leftOut: found.leftOut[i], latents: found.latents[i].map((latent, j) => [latent, found.values[i][j]])}));
  Object.assign(reading, {tokens, name: "Your text", at: -1, latent: -1});
}

async function textView() {
  if (!reading.tokens.length && book.samples[0]) await sample(0);
  const shown = make("div", {}), problem = make("p", {class: "notes", role: "alert", hidden: true});
  const update = async work => {
    try { problem.hidden = true; await work(); drawText(shown); } catch (error) { problem.hidden = false; problem.textContent = error.message; }
  };
  drawText(shown);
  const names = Array.from({length: book.samples[0]}, (_, i) => make("option", {value: i, selected: reading.name === `Sample ${i + 1}`}, `Sample ${i + 1}`));
  const choice = make("select", {id: "sample", onchange: event => update(() => sample(Number(event.target.value)))}, ...names);
  return [
    make("header", {}, make("h2", {}, "Latents in a text")), SERVED ? ownText(update) : null, problem,
    names.length ? make("p", {class: "controls"}, make("label", {}, SERVED ? "or a sample of the text read" : "Sample of the text read", choice)) : null,
    SERVED ? null : make("p", {class: "note"}, "To read your own text, serve this page with the model: sampled-sae browse SAE --serve"),
    shown,
  ].filter(node => node);
}

function ownText(update) {
  const box = make("textarea", {rows: 3, maxlength: 4000, "aria-label": "Your text", placeholder: "Type a text of up to 512 tokens"});
  box.value = reading.text;
  const button = make("button", {type: "submit"}, "Read");
  const send = async event => {
    event.preventDefault();
    reading.text = box.value;
    button.disabled = true;
    await update(() => run(box.value));
    button.disabled = false;
  };
  return make("form", {class: "own", onsubmit: send}, box, button);
}

function drawText(shown) {
  const {tokens, latent, at} = reading, maximum = latent < 0 ? 0 : book.columns.maximum[latent];
  const words = tokens.map((token, i) => {
    const value = token.latents.find(([one]) => one === latent)?.[1] ?? 0, part = Math.min(1, value / (maximum || value || 1));
    return make("button", {
      type: "button", class: value ? "hot" : token.leftOut ? "left-out" : "", "--heat-part": part.toFixed(3), "aria-pressed": String(i === at),
      title: value ? short(value) : token.leftOut ? "Left out: a special token, or one of a high norm" : undefined, onclick: () => { reading.at = i === at ? -1 : i; drawText(shown); shown.querySelectorAll(".words button")[i].focus(); },
    }, token.text);
  });
  const rows = at < 0 ? most(tokens) : tokens[at].latents.map(([one, value]) => ({latent: one, value, note: `${percent(value, book.columns.maximum[one])} of its largest`}));
  const title = at < 0 ? "Strongest latents in this text" : `Latents at “${tokens[at].text}”`;
  const note = at < 0 ? "By their largest activation here, as a share of the largest in the text read for this page." : tokens[at].leftOut ? "It was left out: a special token, or one of a high norm, on which most latents fire." : "By activation, the largest first.";
  shown.replaceChildren(
    section(reading.name, "Click a token to list its latents. Click Shade to mark where a latent fires.", make("p", {class: "words context", dir: "ltr"}, ...words)),
    section(title, note, make("ol", {class: "neighbors"}, ...rows.map(row => latentRow(row, shown)))));
}

function latentRow({latent, value, note}, shown) {
  const on = latent === reading.latent, toggle = () => { reading.latent = on ? -1 : latent; drawText(shown); };
  const line = neighbor(NaN, link(latent), topTokens(latent), explanation(latent), note);
  line.firstChild.textContent = short(value);
  line.append(make("button", {type: "button", class: "shade", "aria-pressed": String(on), onclick: toggle}, "Shade"));
  return line;
}

// The latents of the largest activations relative to their maximum, ten of them.
function most(tokens) {
  const found = new Map();
  for (const token of tokens) for (const [latent, value] of token.latents) {
    const old = found.get(latent) ?? {latent, value: 0, count: 0};
    found.set(latent, {latent, value: Math.max(old.value, value), count: old.count + 1});
  }
  const relative = row => row.value / (book.columns.maximum[row.latent] || Infinity);
  return [...found.values()].sort((a, b) => relative(b) - relative(a) || b.count - a.count || a.latent - b.latent).slice(0, 10)
    .map(row => ({...row, note: `${percent(row.value, book.columns.maximum[row.latent])} of its largest; at ${row.count} of ${tokens.length} tokens`}));
}
