/* A page that is opened from the disk may not start a worker: the search's runs in a hidden frame instead. Its index is
   then the script search/search_index.js, which tools/docs/hooks.py writes. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.addEventListener("load", () => this.start(frame.contentWindow, url), { once: true })
      document.documentElement.append(frame)
    }

    start(inner, url) {
      const deliver = (target, data) => setTimeout(() => target.dispatchEvent(new MessageEvent("message", { data })))
      inner.postMessage = (data) => deliver(this, data)
      const script = inner.document.createElement("script")
      script.src = url
      script.onload = () => {
        this.postMessage = (data) => deliver(inner, data)
        this.waiting.forEach(this.postMessage)
      }
      inner.document.documentElement.append(script)
    }

    postMessage(data) {
      this.waiting.push(data)
    }

    terminate() {}
  }
}
