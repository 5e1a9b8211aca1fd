// Run exported folders in transformers.js: `node check.mjs FOLDERS texts.json`, results as JSON on the standard output.
import { readFileSync } from "node:fs";
import { AutoTokenizer, env, pipeline } from "@huggingface/transformers";

const [folders, requests] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = folders;

const results = [];
for (const { task, folder, dtype, texts, options } of JSON.parse(readFileSync(requests, "utf-8"))) {
  const tokenizer = await AutoTokenizer.from_pretrained(folder);
  const run = await pipeline(task, folder, { dtype, device: "cpu" });
  const output = await run(texts, options);
  results.push({
    ids: texts.map((text) => tokenizer.encode(text)),
    output: output.tolist?.() ?? output,
  });
  await run.dispose();
}
console.log(JSON.stringify(results));
