"""Retrieval with LangChain over documents with stored KV, which are not computed again for each question.

    python examples/retriever.py                                   # a hundred synthetic documents, six questions
    python examples/retriever.py --question "What is k7?" --k 6
    python examples/retriever.py --model Qwen/Qwen2.5-0.5B-Instruct
    python examples/retriever.py --model NAME_OR_PATH --documents FOLDER --question "Who wrote it?"

It needs `pip install langchain-core`. The KV of the documents is computed once, into --store; another run finds it
there. For each question, a LangChain retriever selects documents, `build_prompt` joins their tokens, and
`generate(past_key_values=TieredCache(...))` restores their KV at any position of the prompt, and computes the tokens
that depend most on their context. For comparison, the whole prompt is also computed.

A LangChain prompt template would join the documents as text, and tokens would merge at the borders: merged tokens are
not found in the store. Therefore the documents are passed to the model as a list.

For your own application, replace `retriever_over` by FAISS with an embedding model, or any other retriever, and take
`Reader` from stored_corpus.py. The model is SmolLM2-135M-Instruct, or any other one that --model names. If it cannot be
downloaded, the project's reference model takes its place (`--model eval/reference/xs`): it answers "What is k7?" about
synthetic documents, and is so small that computing takes about as long as restoring.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from long_context import positive
from stored_corpus import MODEL, Answer, Lexical, Question, Reader, load, made_corpus

try:
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnableLambda, RunnablePassthrough
except ImportError:
    raise SystemExit("this example needs LangChain: pip install langchain-core") from None


class LexicalRetriever(BaseRetriever):
    """Retriever by words, which needs no model.

    Args:
        documents: Documents in their order.
        k: Number of retrieved documents.
    """

    documents: list[Document]
    k: int = 8

    def model_post_init(self, context: Any) -> None:
        self._lexical = Lexical([document.page_content for document in self.documents])

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [self.documents[number] for number in self._lexical.best(query, self.k)]


def retriever_over(documents: list[Document], k: int) -> BaseRetriever:
    """Return a retriever of LangChain; replace it by your own.

    With an embedding model and FAISS (`pip install langchain-huggingface langchain-community faiss-cpu`):

        embeddings = HuggingFaceEmbeddings(model_name="BAAI/bge-small-en-v1.5")
        return FAISS.from_documents(documents, embeddings).as_retriever(search_kwargs={"k": k})
    """
    return LexicalRetriever(documents=documents, k=k)


def chain_of(retriever: BaseRetriever, reader: Reader) -> Any:
    """Return a chain from a question to an `Answer` and its documents."""

    def read(inputs: dict[str, Any]) -> dict[str, Any]:
        texts = [document.page_content for document in inputs["documents"]]
        return {**inputs, "answer": reader.answer(inputs["question"], texts)}

    return {"question": RunnablePassthrough(), "documents": retriever} | RunnableLambda(read)


def main() -> int:
    """Run the example, and return the exit status."""
    arguments = arguments_of()
    from hf_tiered_cache import KVStore, TieredCacheError

    try:
        model, tokenizer = load(arguments.model, arguments.dtype)
        temporary = tempfile.TemporaryDirectory(prefix="hf-tiered-retriever-")
        with temporary as folder, KVStore(arguments.store or folder) as store:
            answer_all(Reader(model, tokenizer, store, arguments.method, arguments.new_tokens), arguments)
    except (TieredCacheError, OSError, UnicodeError) as error:  # such as a document that is no text
        raise SystemExit(str(error)) from None
    return 0


def answer_all(reader: Reader, arguments: argparse.Namespace) -> None:
    """Store the documents, and answer the questions."""
    texts, questions = corpus_of(arguments, reader)
    documents = [Document(text, metadata={"number": number}) for number, text in enumerate(texts)]
    report = reader.keep(texts, progress=True)
    print(f"{len(texts)} documents, {report.tokens} tokens: {report.stored} stored, {report.restored} were before")
    chain = chain_of(retriever_over(documents, arguments.k), reader)
    chain.invoke(questions[0].question)  # warm up: the first pass of a process is slow
    for question in questions:
        tell(question, chain.invoke(question.question), reader)


def tell(question: Question, result: dict[str, Any], reader: Reader) -> None:
    """Print the answer, its documents, and the answer of a model that computes them all."""
    from transformers import DynamicCache

    documents, answer = result["documents"], result["answer"]
    numbers = ", ".join(str(document.metadata["number"]) for document in documents)
    print(f"\n{question.question}{f'    (right: {question.answer})' if question.answer else ''}\n  documents {numbers}")
    texts = [document.page_content for document in documents]
    recomputed = reader.answer(question.question, texts, DynamicCache(config=reader.model.config))
    stats = answer.stats
    print(f"  {summary(answer)}: {stats.tokens_restored} of {answer.tokens} tokens restored")
    print(f"  {summary(recomputed)}: all computed")
    if stats.reason:
        print(f"  {stats.reason}")


def summary(answer: Answer) -> str:
    """Format an answer and its time to first token."""
    return f"{answer.text!r}, first token after {answer.ttft:.3f} s"


def corpus_of(arguments: argparse.Namespace, reader: Reader) -> tuple[list[str], list[Question]]:
    """Return the documents of a folder, or synthetic ones, with the questions about them."""
    if arguments.documents:
        texts = [path.read_text(encoding="utf-8") for path in sorted(arguments.documents.glob("*.txt"))]
        if not texts:
            raise SystemExit(f"--documents: {arguments.documents} holds no .txt files")
        questions = []
    else:
        texts, questions = made_corpus(reader.speaks_language)
        kinds = dict.fromkeys(question.kind for question in questions)
        questions = [
            [question for question in questions if question.kind == kind][n] for kind in kinds for n in range(2)
        ]
    if arguments.question:
        questions = [Question(in_language(words, reader), "", (), "") for words in arguments.question]
    if not questions:
        raise SystemExit("--documents needs --question")
    return texts, questions


def in_language(words: str, reader: Reader) -> str:
    """Return `<q><k7>` for "What is k7?" if the model knows that language, and other words unchanged."""
    keys = re.findall(r"\bk\d+\b", words) if reader.speaks_language and "<" not in words else []
    return f"<q><{keys[-1]}>" if keys else words


def arguments_of() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        help=f"model of the hub, folder, or short name of eval.models; default: {MODEL}",
    )
    parser.add_argument("--dtype", default="auto", help="data type of the weights; default: the model's")
    parser.add_argument(
        "--documents", type=Path, metavar="FOLDER", help="folder of .txt files to use instead of synthetic documents"
    )
    parser.add_argument(
        "--question", action="append", metavar="TEXT", help="question; may be repeated; default: synthetic ones"
    )
    parser.add_argument("--k", type=positive, default=8, metavar="N", help="documents in a prompt; default: 8")
    parser.add_argument("--method", help='method, such as "cache_tune:recompute=0.3" or "epic"; default: cache_tune')
    parser.add_argument(
        "--new-tokens", type=positive, default=32, metavar="N", help="maximum tokens of an answer; default: %(default)s"
    )
    parser.add_argument(
        "--store", metavar="DIR", help="folder of the store; default: a temporary one, deleted at the end"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
