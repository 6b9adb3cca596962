//! Who holds which block of the KV cache. Counts only: the memory is the worker's.
//!
//! A block is held by the sequences whose block tables it stands in, or free. Free blocks stand in one list, first to be
//! reused in front: those without content, then those that the prefix cache knows, least recently used first. Blocks that a
//! step in flight may still write stay held until that step is done.

use std::collections::VecDeque;

use drafthorse_control::{BlockId, TokenId};

use crate::prefix_cache::{PrefixCache, PrefixKey};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Block {
    refs: u32,
    /// The prefix that ends with this block, while the cache knows it.
    key: Option<PrefixKey>,
    /// Neighbours in the list of free blocks.
    prev: u32,
    next: u32,
}

/// Allocates, shares and frees blocks.
#[derive(Debug)]
pub(crate) struct BlockManager {
    block_size: usize,
    blocks: Vec<Block>,
    first_free: u32,
    last_free: u32,
    num_free: usize,
    /// Blocks given back, and the step after which nothing writes them any more.
    in_flight: VecDeque<(u64, Vec<BlockId>)>,
    pub(crate) cache: PrefixCache,
}

impl BlockManager {
    pub(crate) fn new(num_blocks: u32, block_size: u32) -> Self {
        let block = Block { refs: 0, key: None, prev: NONE, next: NONE };
        let mut manager = BlockManager {
            block_size: block_size as usize,
            blocks: vec![block; num_blocks as usize],
            first_free: NONE,
            last_free: NONE,
            num_free: 0,
            in_flight: VecDeque::new(),
            cache: PrefixCache::new(num_blocks as usize),
        };
        for block in 0..num_blocks {
            manager.push_back(block);
        }
        manager
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    pub(crate) fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that can be allocated now.
    pub(crate) fn num_free(&self) -> usize {
        self.num_free
    }

    /// Blocks that become free with the steps in flight; fewer if others share them.
    pub(crate) fn num_in_flight(&self) -> usize {
        self.in_flight.iter().map(|(_, blocks)| blocks.len()).sum()
    }

    /// Blocks that hold `num_tokens`.
    pub(crate) fn blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// `count` blocks, or none if fewer are free. What the cache knew of them is forgotten.
    pub(crate) fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if count > self.num_free {
            return None;
        }
        Some((0..count).map(|_| self.pop_front()).collect())
    }

    /// Free blocks among `blocks`: what sharing them would take from [`num_free`](Self::num_free).
    pub(crate) fn count_free(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|block| self.blocks[block.0 as usize].refs == 0).count()
    }

    /// Holds blocks that the prefix cache has found, once more.
    pub(crate) fn share(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            if self.blocks[block.0 as usize].refs == 0 {
                self.unlink(block.0);
            }
            self.blocks[block.0 as usize].refs += 1;
        }
    }

    /// Gives a block table back; `last_step` is the newest step in flight, if any.
    pub(crate) fn free(&mut self, blocks: Vec<BlockId>, last_step: Option<u64>) {
        match last_step {
            Some(step) if !blocks.is_empty() => self.in_flight.push_back((step, blocks)),
            _ => self.free_now(&blocks),
        }
    }

    /// Frees what only waited for `step`.
    pub(crate) fn step_done(&mut self, step: u64) {
        while let Some((_, blocks)) = self.in_flight.pop_front_if(|(last_step, _)| *last_step <= step) {
            self.free_now(&blocks);
        }
    }

    /// From the last block to the first, so that a prefix loses its end before its beginning.
    fn free_now(&mut self, blocks: &[BlockId]) {
        for &BlockId(block) in blocks.iter().rev() {
            let entry = &mut self.blocks[block as usize];
            debug_assert!(entry.refs > 0, "block {block} was freed twice");
            entry.refs = entry.refs.saturating_sub(1);
            match (entry.refs, entry.key) {
                (0, Some(_)) => self.push_back(block),
                (0, None) => self.push_front(block),
                _ => {}
            }
        }
    }

    /// Lets prompts find the block of `table` at `at` under `key`, unless another block has that content already.
    pub(crate) fn remember(&mut self, table: &[BlockId], at: usize, key: PrefixKey) {
        let (block, after) = (table[at], at.checked_sub(1).map(|before| table[before]));
        if self.blocks[block.0 as usize].key.is_none() && self.cache.insert(key, block, after) {
            self.blocks[block.0 as usize].key = Some(key);
        }
    }

    /// Extends `keys` to all full blocks of `tokens`; `root` is the key before the first.
    pub(crate) fn extend_keys(&self, root: PrefixKey, keys: &mut Vec<PrefixKey>, tokens: &[TokenId]) {
        let known = keys.len() * self.block_size;
        for block in tokens.get(known..).unwrap_or_default().chunks_exact(self.block_size) {
            let parent = keys.last().copied().unwrap_or(root);
            keys.push(self.cache.child(parent, block));
        }
    }

    fn pop_front(&mut self) -> BlockId {
        let block = self.first_free;
        self.unlink(block);
        let entry = &mut self.blocks[block as usize];
        entry.refs = 1;
        if let Some(key) = entry.key.take() {
            self.cache.remove(key);
        }
        BlockId(block)
    }

    fn push_back(&mut self, block: u32) {
        let last = std::mem::replace(&mut self.last_free, block);
        self.blocks[block as usize].prev = last;
        self.blocks[block as usize].next = NONE;
        match last {
            NONE => self.first_free = block,
            last => self.blocks[last as usize].next = block,
        }
        self.num_free += 1;
    }

    fn push_front(&mut self, block: u32) {
        let first = std::mem::replace(&mut self.first_free, block);
        self.blocks[block as usize].next = first;
        self.blocks[block as usize].prev = NONE;
        match first {
            NONE => self.last_free = block,
            first => self.blocks[first as usize].prev = block,
        }
        self.num_free += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Block { prev, next, .. } = self.blocks[block as usize];
        match prev {
            NONE => self.first_free = next,
            prev => self.blocks[prev as usize].next = next,
        }
        match next {
            NONE => self.last_free = prev,
            next => self.blocks[next as usize].prev = prev,
        }
        self.num_free -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(blocks: &[BlockId]) -> Vec<u32> {
        blocks.iter().map(|block| block.0).collect()
    }

    /// Remembers `blocks` as the prefix that `tokens` begin with; returns its keys.
    fn remember(manager: &mut BlockManager, blocks: &[BlockId], tokens: &[TokenId]) -> Vec<PrefixKey> {
        let mut keys = Vec::new();
        manager.extend_keys(manager.cache.root(0, None), &mut keys, tokens);
        for (at, &key) in keys.iter().enumerate().take(blocks.len()) {
            manager.remember(blocks, at, key);
        }
        keys
    }

    #[test]
    fn gives_all_or_nothing() {
        let mut manager = BlockManager::new(3, 4);
        let two = manager.allocate(2).unwrap();
        assert_eq!(ids(&two), [0, 1]);
        assert_eq!(manager.allocate(2), None);
        assert_eq!(manager.num_free(), 1);
        manager.free(two, None);
        assert_eq!(manager.num_free(), 3);
        assert_eq!(manager.blocks_for(8), 2);
        assert_eq!(manager.blocks_for(9), 3);
    }

    #[test]
    fn a_block_that_a_step_may_write_is_free_after_that_step() {
        let mut manager = BlockManager::new(2, 4);
        let blocks = manager.allocate(2).unwrap();
        manager.free(blocks, Some(7));
        manager.step_done(6);
        assert_eq!((manager.num_free(), manager.num_in_flight()), (0, 2));
        manager.step_done(7);
        assert_eq!((manager.num_free(), manager.num_in_flight()), (2, 0));
    }

    #[test]
    fn empty_blocks_go_first_then_the_end_of_the_oldest_prefix() {
        let mut manager = BlockManager::new(5, 2);
        let old = manager.allocate(2).unwrap();
        let new = manager.allocate(1).unwrap();
        let empty = manager.allocate(2).unwrap();
        let old_keys = remember(&mut manager, &old, &[1, 2, 3, 4]);
        let new_keys = remember(&mut manager, &new, &[5, 6]);
        manager.free(old, None);
        manager.free(new, None);
        manager.free(empty, None);

        assert_eq!(ids(&manager.allocate(3).unwrap()), [3, 4, 1]);
        assert_eq!(ids(&manager.cache.find(&old_keys)), [0], "the beginning of the old prefix is left");
        assert_eq!(ids(&manager.cache.find(&new_keys)), [2]);
    }

    #[test]
    fn a_shared_block_is_free_when_the_last_holder_lets_go() {
        let mut manager = BlockManager::new(2, 2);
        let blocks = manager.allocate(1).unwrap();
        let keys = remember(&mut manager, &blocks, &[1, 2, 3]);
        assert_eq!(keys.len(), 1, "only full blocks have keys");
        let found = manager.cache.find(&keys);
        assert_eq!(manager.count_free(&found), 0);
        manager.share(&found);
        manager.free(blocks, None);
        assert_eq!(manager.num_free(), 1);
        manager.free(found.clone(), None);
        assert_eq!(manager.num_free(), 2);
        assert_eq!(manager.count_free(&found), 1);
        manager.share(&found);
        assert_eq!(manager.num_free(), 1, "a free block found again is taken off the list");
    }
}
