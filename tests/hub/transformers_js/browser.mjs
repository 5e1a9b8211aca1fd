// Open a page in Chromium, type into it and read it: `node browser.mjs PAGE CHROMIUM request.json`, results as JSON.
import { readFileSync } from "node:fs";
import { chromium } from "playwright-core";

const [address, executablePath, request] = process.argv.slice(2);
const { texts, query, sentence, picture } = JSON.parse(readFileSync(request, "utf-8"));
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
try {
  const page = await browser.newPage({ viewport: { width: 1000, height: 700 } });
  page.setDefaultTimeout(300_000);
  const outside = [];
  page.on("request", (sent) => sent.url().startsWith(address) || outside.push(sent.url()));
  const ready = () => page.waitForFunction(() => document.getElementById("status").textContent === "ready");
  const rows = (list) =>
    page.$$eval(`#${list} li`, (found) => found.map((row) => [...row.children].slice(1).map((part) => part.textContent)));
  await page.goto(address);
  await ready();
  await page.screenshot({ path: picture });
  const visible = await page.$$eval("section:not([hidden])", (found) => found.map((section) => section.id));
  const results = { outside, visible };
  if (visible.includes("search")) {
    await page.fill("#texts", texts.join("\n"));
    await page.fill("#query", query);
    await ready();
    results.ranking = await rows("ranking");
    results.vectors = await page.evaluate(async (all) => {
      const { embed } = await import("./app.js");
      const vectors = [];
      for (const text of all) vectors.push(await embed(text));
      return vectors;
    }, texts);
  }
  if (visible.includes("fill")) {
    await page.fill("#sentence", sentence);
    await ready();
    results.guesses = await rows("guesses");
  }
  results.ids = await page.evaluate(async (all) => all.map((await import("./app.js")).tokenize), texts);
  console.log(JSON.stringify(results));
} finally {
  await browser.close();
}
