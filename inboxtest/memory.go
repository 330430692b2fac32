package inboxtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// MemoryRepository is an [inbox.Repository] in memory, with effects that are committed and rolled back
// with the claim. It is for unit tests: it passes [TestRepository], and forgets all when the process ends.
// The zero value is an empty repository. It must not be copied after its first use.
type MemoryRepository struct {
	mutex   sync.Mutex
	claims  map[inbox.Key]*memoryTransaction // open; made by the first claim
	records map[inbox.Key]time.Time          // when they were claimed; made by the first commit
	unsent  []*memoryUnsent                  // in the order of the records
	effects []string
}

// memoryUnsent are messages that are not known to be sent.
type memoryUnsent struct {
	inbox.Record
	storedAt, leasedUntil time.Time
}

var (
	_ inbox.Looker          = (*MemoryRepository)(nil)
	_ inbox.RelayRepository = (*MemoryRepository)(nil)
)

// NewMemoryRepository returns an empty repository.
func NewMemoryRepository() *MemoryRepository {
	return &MemoryRepository{}
}

type memoryTransaction struct {
	repository *MemoryRepository
	ctx        context.Context
	record     inbox.Record
	storedAt   time.Time
	effects    []string
	ended      bool
	byHandler  bool
	done       chan struct{}
	stop       func() bool
}

// Claim implements [inbox.Repository].
func (r *MemoryRepository) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		r.mutex.Lock()
		other := r.claims[params.Key]
		if other == nil {
			break
		}
		r.mutex.Unlock()
		select {
		case <-other.done:
		case <-ctx.Done():
		}
	}
	defer r.mutex.Unlock()
	if record := r.record(params.Key); record != nil {
		return nil, record, nil
	}
	t := &memoryTransaction{repository: r, ctx: ctx, record: inbox.Record{Key: params.Key, ProcessedAt: time.Now()}, done: make(chan struct{})}
	if r.claims == nil {
		r.claims = map[inbox.Key]*memoryTransaction{}
	}
	r.claims[params.Key] = t
	t.stop = context.AfterFunc(ctx, func() {
		r.mutex.Lock()
		defer r.mutex.Unlock()
		t.end()
	})
	return t, nil, nil
}

// record returns nil if there is none. The mutex is held.
func (r *MemoryRepository) record(key inbox.Key) *inbox.Record {
	processedAt, ok := r.records[key]
	if !ok {
		return nil
	}
	record := &inbox.Record{Key: key, ProcessedAt: processedAt}
	for _, unsent := range r.unsent {
		if unsent.Compare(*record) == 0 {
			*record = unsent.Record
		}
	}
	return record
}

// Look implements [inbox.Looker].
func (r *MemoryRepository) Look(ctx context.Context, params inbox.ClaimParams) (found *inbox.Record, err error) {
	err = r.locked(ctx, func() { found = r.record(params.Key) })
	return found, err
}

// MarkSent implements [inbox.Repository]. Nothing is ever locked.
func (r *MemoryRepository) MarkSent(ctx context.Context, records []inbox.Record) (locked []inbox.Record, err error) {
	_, err = r.DeleteUnsent(ctx, records)
	return nil, err
}

// Write writes an effect through the transaction in the handler's context.
func (r *MemoryRepository) Write(ctx context.Context, effect string) error {
	return r.inTransaction(ctx, func(t *memoryTransaction) { t.effects = append(t.effects, effect) })
}

// EndTransaction commits the transaction in the handler's context, or rolls it back, behind the middleware's back: what a
// handler must not do.
func (r *MemoryRepository) EndTransaction(ctx context.Context, commit bool) error {
	return r.inTransaction(ctx, func(t *memoryTransaction) {
		if commit {
			t.commit()
		}
		t.end()
		t.byHandler = true
	})
}

func (r *MemoryRepository) inTransaction(ctx context.Context, do func(*memoryTransaction)) error {
	t, ok := inbox.TransactionFromContext[*memoryTransaction](ctx)
	if !ok {
		return errors.New("inboxtest: no open transaction in the context")
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if t.ended {
		return errTransactionEnded
	}
	do(t)
	return nil
}

// Effects returns the effects that have been committed, in the order of the commits.
func (r *MemoryRepository) Effects() []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return append([]string(nil), r.effects...)
}

// Age makes a record, and the messages stored with it, older.
func (r *MemoryRepository) Age(key inbox.Key, by time.Duration) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if at, ok := r.records[key]; ok {
		r.records[key] = at.Add(-by)
	}
	for _, unsent := range r.unsent {
		if unsent.Key == key {
			unsent.ProcessedAt, unsent.storedAt = unsent.ProcessedAt.Add(-by), unsent.storedAt.Add(-by)
		}
	}
	slices.SortFunc(r.unsent, func(a, b *memoryUnsent) int { return a.Compare(b.Record) })
}

var errTransactionEnded = errors.New("inboxtest: the transaction has ended")

// Store implements [inbox.Transaction].
func (t *memoryTransaction) Store(_ context.Context, params inbox.StoreParams) (time.Time, error) {
	t.repository.mutex.Lock()
	defer t.repository.mutex.Unlock()
	if t.ended {
		return time.Time{}, t.whyEnded()
	}
	t.storedAt = time.Now()
	t.record.Topic, t.record.Produced = params.Topic, append([]byte{}, params.Produced...)
	return t.record.ProcessedAt, nil
}

// Commit implements [inbox.Transaction].
func (t *memoryTransaction) Commit(ctx context.Context) error {
	t.repository.mutex.Lock()
	defer t.repository.mutex.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if t.ended {
		return t.whyEnded()
	}
	t.commit()
	t.end()
	return nil
}

// Rollback implements [inbox.Transaction].
func (t *memoryTransaction) Rollback() error {
	t.repository.mutex.Lock()
	defer t.repository.mutex.Unlock()
	if t.byHandler {
		return t.whyEnded()
	}
	t.end()
	return nil
}

// whyEnded is the error of a step after the end. The mutex is held.
func (t *memoryTransaction) whyEnded() error {
	if !t.byHandler {
		return cmp.Or(t.ctx.Err(), errTransactionEnded)
	}
	claim := "rolled back"
	if _, ok := t.repository.records[t.record.Key]; ok {
		claim = "committed"
	}
	return inbox.Permanent(fmt.Errorf("%w: it has ended it, and the claim is %s: %w", inbox.ErrTransactionBroken, claim, errTransactionEnded))
}

// commit keeps what was written. The mutex is held.
func (t *memoryTransaction) commit() {
	r := t.repository
	if r.records == nil {
		r.records = map[inbox.Key]time.Time{}
	}
	r.records[t.record.Key] = t.record.ProcessedAt
	r.effects = append(r.effects, t.effects...)
	if t.record.Produced != nil {
		r.unsent = append(r.unsent, &memoryUnsent{Record: t.record, storedAt: t.storedAt})
		slices.SortFunc(r.unsent, func(a, b *memoryUnsent) int { return a.Compare(b.Record) })
	}
}

// end lets the next one claim. The mutex is held.
func (t *memoryTransaction) end() {
	if t.ended {
		return
	}
	t.ended = true
	t.stop()
	delete(t.repository.claims, t.record.Key)
	close(t.done)
}
