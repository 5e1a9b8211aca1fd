// Semantic search and fill-mask in the visitor's own browser. settings.json names the models and the library's folder.
const settings = await (await fetch("settings.json")).json();
const { query_prompt, document_prompt, pooling } = settings.search ?? {};
const find = (id) => document.getElementById(id);
const say = (text) => (find("status").textContent = text);
const vectors = new Map();
let extractor, filler;

// The embedding of a text, of length 1. Each text is computed once.
export async function embed(text) {
  if (!vectors.has(text)) vectors.set(text, (await extractor(text, { pooling, normalize: true })).tolist()[0]);
  return vectors.get(text);
}

// The texts with their cosines with the query, best first.
export async function search(query, texts) {
  const wanted = await embed(query_prompt + query);
  const found = [];
  for (const text of texts) {
    const vector = await embed(document_prompt + text);
    found.push({ text, score: vector.reduce((sum, value, index) => sum + value * wanted[index], 0) });
  }
  return found.sort((a, b) => b.score - a.score);
}

// The five most likely tokens in place of [MASK], with their probabilities.
export async function fill(sentence) {
  if (!sentence.includes(filler.tokenizer.mask_token)) return [];
  return (await filler(sentence, { top_k: 5 })).map(({ token_str, score }) => ({ text: token_str, score }));
}

export const tokenize = (text) => (extractor ?? filler).tokenizer.encode(text);

// Show the rows of `work` in a list, now and after each input into the section.
async function follow(section, list, work) {
  let latest = 0;
  const run = async () => {
    const number = ++latest;
    say("computing …");
    const rows = await work();
    if (number !== latest) return; // The visitor has typed on.
    find(list).replaceChildren(...rows.map(show));
    say("ready");
  };
  find(section).hidden = false;
  find(section).addEventListener("input", () => run().catch((error) => say(error.message)));
  await run();
}

function show({ text, score }) {
  const [row, bar, name, value] = ["li", "i", "span", "b"].map((tag) => document.createElement(tag));
  bar.style.width = `${100 * Math.max(score, 0)}%`;
  name.textContent = text;
  value.textContent = score.toFixed(3);
  row.append(bar, name, value);
  return row;
}

async function start() {
  const library = new URL(settings.library, location).href;
  const { env, pipeline } = await import(library + "transformers.min.js");
  // In a browser, transformers.js looks for models on the Hub only. Ours lie beside the page.
  env.allowLocalModels = true;
  env.localModelPath = "./";
  // Unless it is told otherwise, it loads ONNX Runtime from its CDN.
  if (library.startsWith(location.origin)) env.backends.onnx.wasm.wasmPaths = library;
  const load = (task, { model }) => pipeline(task, model, { dtype: settings.dtype });
  say("loading the model …");
  extractor = settings.search && (await load("feature-extraction", settings.search));
  filler = settings.fill && (await load("fill-mask", settings.fill));
  const texts = () => find("texts").value.split("\n").filter((text) => text.trim());
  if (extractor) await follow("search", "ranking", () => search(find("query").value, texts()));
  if (filler) await follow("fill", "guesses", () => fill(find("sentence").value));
}

start().catch((error) => say(error.message));
