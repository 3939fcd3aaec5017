// The files beside the page. Each is a script that calls sampledSae(name, content): pages on disk may not fetch files.
const FOLDER = document.documentElement.dataset.folder;
const received = new Map(), asked = new Map();

function sampledSae(name, content) { received.set(name, content); }

function load(name) {
  if (!asked.has(name)) asked.set(name, new Promise((resolve, reject) => {
    const tag = document.createElement("script");
    const fail = () => {
      asked.delete(name);
      reject(new Error(`${FOLDER}/${name}.js cannot be read. The page must lie beside its folder of data; if it was made anew, reload it.`));
    };
    tag.onload = () => { tag.remove(); received.has(name) ? resolve(received.get(name)) : fail(); };
    tag.onerror = () => { tag.remove(); fail(); };
    tag.src = `${FOLDER}/${name}.js`;
    document.head.append(tag);
  }));
  return asked.get(name);
}

const TYPES = {f4: Float32Array, u1: Uint8Array, u2: Uint16Array, i4: Int32Array};

// A column of numbers. In whole numbers, -1 stands for none; the largest of an unsigned type is how it is written.
function unpack({type, data}) {
  const letters = atob(data), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const values = new TYPES[type](bytes.buffer);
  if (type === "f4" || type === "i4") return values;
  const none = type === "u1" ? 255 : 65535, signed = new Int32Array(values.length);
  for (let i = 0; i < values.length; i++) signed[i] = values[i] === none ? -1 : values[i];
  return signed;
}

const unpackAll = columns => Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, unpack(column)]));

// What is known at once. Filled by browse.js before anything is drawn.
const book = {about: {}, latents: 0, columns: {}, words: [], bytes: new Map(), explanations: new Map()};

const chunks = new Map(), texts = new Map();

async function chunkOf(latent) {
  const number = Math.floor(latent / book.latentsAChunk);
  if (!chunks.has(number)) {
    const found = await load(`chunk-${number}`);
    chunks.set(number, {...found, columns: unpackAll(found.columns)});
    received.delete(`chunk-${number}`);
  }
  return {...chunks.get(number), row: latent - number * book.latentsAChunk};
}

// The tokens of a context, as numbers of words.
async function contextTokens(context) {
  const file = Math.floor(context / book.contextsAFile);
  if (!texts.has(file)) texts.set(file, unpack((await load(`text-${file}`)).tokens));
  const begin = (context - file * book.contextsAFile) * book.length;
  return texts.get(file).subarray(begin, begin + book.length);
}

const part = (values, row, width) => values.subarray(row * width, (row + 1) * width);
const topTokens = latent => [...part(book.columns.tokens, latent, book.tokensKept)].filter(token => token >= 0);
