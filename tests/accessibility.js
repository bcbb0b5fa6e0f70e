// What accessibility.py asks a page.
({
  // Everything that is wrong with the page.
  problems() {
    const found = [];
    const all = (what) => [...document.querySelectorAll(what)];
    const short = (node) => node.outerHTML.slice(0, 120);
    const hidden = (node) => node.closest("[aria-hidden=true]") || !node.getClientRects().length;

    const wide = document.documentElement.scrollWidth;
    if (wide > window.innerWidth) found.push(`the page is ${wide} wide, the window ${window.innerWidth}`);

    const levels = all("h1,h2,h3,h4,h5,h6").map((heading) => Number(heading.tagName[1]));
    if (levels[0] !== 1 || levels.filter((level) => level === 1).length !== 1) found.push(`headings: ${levels}`);
    levels.forEach((level, k) => { if (k && level > levels[k - 1] + 1) found.push(`heading ${k} jumps: ${levels}`); });

    for (const image of all("img")) if (!image.alt) found.push(`no alternative text: ${short(image)}`);
    for (const drawing of all("svg")) {
      const named = drawing.getAttribute("aria-label") || drawing.querySelector(":scope > title");
      if (!named && !drawing.closest("[aria-hidden=true]")) found.push(`no label: ${short(drawing)}`);
    }
    for (const table of all("table")) if (!table.caption || !table.caption.textContent.trim()) found.push(`no caption: ${short(table)}`);
    for (const cell of all("th")) if (!cell.scope || !cell.textContent.trim()) found.push(`th without scope or text: ${short(cell)}`);
    for (const input of all("input, select, button")) {
      const named = input.getAttribute("aria-label") || input.textContent.trim() || (input.labels && input.labels.length);
      if (!named) found.push(`no label: ${short(input)}`);
    }
    for (const node of all("body *")) {
      const scrolls = /auto|scroll/.test(getComputedStyle(node).overflowX) && node.scrollWidth > node.clientWidth;
      if (scrolls && node.tabIndex < 0) found.push(`scrolls, but not by keyboard: ${short(node)}`);
    }

    const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
    const light = (colour) => {
      const [r, g, b] = channels(colour).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (node) => {
      for (; node; node = node.parentElement) {
        const colour = getComputedStyle(node).backgroundColor;
        if ((channels(colour)[3] ?? 1) > 0) return colour;
      }
      return "rgb(255, 255, 255)";
    };
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {
      const node = text.parentElement;
      if (!text.data.trim() || !node.getClientRects().length || node.closest("script, style")) continue;
      const style = getComputedStyle(node);
      const size = parseFloat(style.fontSize);
      const least = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
      const ink = light(node.closest("svg") ? style.fill : style.color);
      const page = light(ground(node));
      const contrast = (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
      if (contrast < least) found.push(`contrast ${contrast.toFixed(2)}: ${short(node)}`);
    }
    return found;
  },

  // Nothing if the focus is seen, null if it is nowhere, or else where it is.
  focus() {
    const node = document.activeElement;
    if (!node || node === document.body) return null;
    const outlines = [node, node.closest("label")].filter(Boolean).map((one) => getComputedStyle(one));
    return outlines.some((style) => style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2)
      ? "" : node.outerHTML.slice(0, 120);
  },
})
