package inboxtest

import (
	"context"
	"errors"
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
	records map[inbox.Key]inbox.Record       // made by the first commit
	effects []string
}

var (
	_ inbox.Repository = (*MemoryRepository)(nil)
	_ inbox.Looker     = (*MemoryRepository)(nil)
	_ inbox.Records    = (*MemoryRepository)(nil)
)

// NewMemoryRepository returns an empty repository.
func NewMemoryRepository() *MemoryRepository {
	return &MemoryRepository{}
}

type memoryTransaction struct {
	repository *MemoryRepository
	key        inbox.Key
	holds      bool // the claim, rather than a look at the record
	record     inbox.Record
	effects    []string
	ended      bool
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
	t := &memoryTransaction{repository: r, key: params.Key, record: inbox.Record{Key: params.Key, ProcessedAt: time.Now()}, done: make(chan struct{})}
	t.stop = context.AfterFunc(ctx, func() { _ = t.Rollback() })
	if record, processed := r.records[params.Key]; processed {
		return t, &record, nil
	}
	t.holds = true
	if r.claims == nil {
		r.claims = map[inbox.Key]*memoryTransaction{}
	}
	r.claims[params.Key] = t
	return t, nil, nil
}

// MarkSent implements [inbox.Repository].
func (r *MemoryRepository) MarkSent(ctx context.Context, records []inbox.Record) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, sent := range records {
		if record, ok := r.records[sent.Key]; ok && record.ProcessedAt.Equal(sent.ProcessedAt) {
			record.Produced = nil
			r.records[sent.Key] = record
		}
	}
	return nil
}

// Look implements [inbox.Looker].
func (r *MemoryRepository) Look(ctx context.Context, params inbox.ClaimParams) (found *inbox.Record, err error) {
	err = r.locked(ctx, func() {
		if record, ok := r.records[params.Key]; ok {
			found = &record
		}
	})
	return found, err
}

// Write writes an effect through the transaction in the handler's context.
func (r *MemoryRepository) Write(ctx context.Context, effect string) error {
	t, ok := inbox.TransactionFromContext[*memoryTransaction](ctx)
	if !ok {
		return errors.New("inboxtest: no open transaction in the context")
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if t.ended {
		return errTransactionEnded
	}
	t.effects = append(t.effects, effect)
	return nil
}

// Effects returns the effects that have been committed, in the order of the commits.
func (r *MemoryRepository) Effects() []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return append([]string(nil), r.effects...)
}

// Age makes a record older.
func (r *MemoryRepository) Age(key inbox.Key, by time.Duration) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if record, ok := r.records[key]; ok {
		record.ProcessedAt = record.ProcessedAt.Add(-by)
		r.records[key] = record
	}
}

var errTransactionEnded = errors.New("inboxtest: the transaction has ended")

// Store implements [inbox.Transaction].
func (t *memoryTransaction) Store(_ context.Context, produced []byte) (time.Time, error) {
	t.repository.mutex.Lock()
	defer t.repository.mutex.Unlock()
	if t.ended {
		return time.Time{}, errTransactionEnded
	}
	t.record.Produced = append([]byte{}, produced...)
	return t.record.ProcessedAt, nil
}

// Commit implements [inbox.Transaction].
func (t *memoryTransaction) Commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return t.end(func() {
		t.repository.effects = append(t.repository.effects, t.effects...)
		if t.repository.records == nil {
			t.repository.records = map[inbox.Key]inbox.Record{}
		}
		t.repository.records[t.key] = t.record
	}, func() error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return errors.Join(inbox.ErrTransactionBroken, errTransactionEnded)
	})
}

// Rollback implements [inbox.Transaction].
func (t *memoryTransaction) Rollback() error {
	return t.end(func() {}, func() error { return nil })
}

// end runs the first function if the transaction is open, else the second.
func (t *memoryTransaction) end(open func(), ended func() error) error {
	t.repository.mutex.Lock()
	defer t.repository.mutex.Unlock()
	if t.ended {
		return ended()
	}
	open()
	t.ended = true
	t.stop()
	if t.holds {
		delete(t.repository.claims, t.key)
	}
	close(t.done)
	return nil
}
