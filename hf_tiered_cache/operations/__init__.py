"""Operations on a store that run a model, or need its tokens: `KVStore` offers them."""
