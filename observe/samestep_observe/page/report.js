"use strict";
// What a page without this has not: curves that are hidden by their run's button, and values at the pointer.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();

  for (const button of document.querySelectorAll("button[data-run]")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      hidden.has(run) ? hidden.delete(run) : hidden.add(run);
      button.setAttribute("aria-pressed", String(!hidden.has(run)));
      for (const each of document.querySelectorAll(`g[data-run="${run}"]`)) each.toggleAttribute("hidden", hidden.has(run));
    });
  }

  // The index of the step nearest to one, of steps in rising order.
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  };

  for (const figure of document.querySelectorAll("figure[data-panel]")) {
    const lines = data.panels[Number(figure.dataset.panel)];
    const plot = figure.querySelector("svg.plot"), cursor = figure.querySelector(".cursor");
    const output = figure.querySelector("output"), last = Number(plot.dataset.last);
    const all = [...new Set(lines.flatMap((line) => line[2]))].sort((a, b) => a - b);
    let at = -1;

    const show = (index) => {
      at = Math.max(0, Math.min(all.length - 1, index));
      const step = all[at], x = `${(100 * step) / last}%`;
      cursor.removeAttribute("hidden");
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      const words = lines.filter((line) => !hidden.has(line[0])).flatMap((line) => {
        const i = nearest(line[2], step);
        return line[2][i] === step ? [`${data.names[line[0]]} ${line[1]} ${line[3][i]}`] : [];
      });
      output.textContent = `step ${step}: ${words.join("; ")}`;
    };
    const leave = () => { at = -1; cursor.setAttribute("hidden", ""); output.textContent = ""; };

    if (!all.length) continue;
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      show(nearest(all, ((event.clientX - box.left) / box.width) * last));
    });
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") leave();
      if (by === undefined) return;
      event.preventDefault();
      show(at < 0 && by === -1 ? all.length - 1 : Math.max(at, -1) + by);
    });
  }
})();
