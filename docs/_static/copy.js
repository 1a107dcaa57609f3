// A button on every block of code that copies it.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("article .highlight")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", () => {
      const code = block.querySelector("pre");
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      // Pages opened as files have no navigator.clipboard in some browsers.
      const copied = navigator.clipboard ? navigator.clipboard.writeText(code.textContent) : document.execCommand("copy");
      Promise.resolve(copied).then(() => { button.textContent = "Copied"; });
    });
    block.append(button);
  }
});
