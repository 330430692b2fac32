package inbox

import (
	"cmp"
	"context"
	"time"
)

// Repository keeps the records of messages that have been processed.
//
// An implementation supplies the steps; their order, the rollback and the commit are the middleware's.
// It must pass inboxtest.TestRepository, which has a case for every sentence below.
// All methods may be called by many goroutines and many processes at once.
//
// Stability: implementations outside of this module are welcome. A method is only ever added with a new
// major version; optional abilities become interfaces of their own, as [Records].
type Repository interface {
	// Claim opens a transaction and claims the key in it. Both are one call, so that a driver that can
	// pipeline sends them in one round trip.
	//
	// The database decides who gets the key, by its unique key alone; nothing is looked up before.
	//   - The key was free: Claim returns the open transaction and a nil record.
	//   - The key is claimed by an open transaction: Claim waits for that to end.
	//   - The key was processed: Claim rolls back, and returns no transaction and the record, as read after that:
	//     "no row was inserted" alone is not enough to say so, and what this transaction saw may be its own doing.
	//   - Otherwise it returns an error, and has rolled back. In doubt it returns an error.
	//
	// The transaction must not outlive ctx: when ctx ends, before or after Claim has returned, the
	// transaction is rolled back and a waiting Claim returns. Claim must need no second connection while
	// it holds one.
	Claim(ctx context.Context, params ClaimParams) (Transaction, *Record, error)

	// MarkSent notes that the messages stored with these records are sent, and forgets the messages. A record is its
	// Key and its ProcessedAt: one that has no stored messages, or was claimed again since, is passed over. It runs in
	// a short transaction of its own and waits for nobody: it returns those records whose messages are locked by
	// somebody else, to be tried again.
	MarkSent(ctx context.Context, records []Record) (locked []Record, err error)
}

// Looker is an optional ability of a [Repository].
type Looker interface {
	// Look returns the record of a key, or nil if there is none, without a transaction and without waiting for
	// one: a claim that is not committed is not seen. So nil does not say that the key is free.
	Look(ctx context.Context, params ClaimParams) (*Record, error)
}

// ClaimParams are what is claimed. Fields may be added.
type ClaimParams struct {
	// Key is valid.
	Key Key
}

// Transaction is an open transaction that holds a claim.
// Its methods are called by one goroutine; the handler may use what it wraps until the handler returns.
type Transaction interface {
	// Store keeps the messages that the handler returned with the claim's record, in this transaction. It returns when
	// the key was claimed, as the record will say.
	Store(ctx context.Context, params StoreParams) (processedAt time.Time, err error)

	// Commit commits the claim and all that the handler wrote. It returns nil only if the database has
	// said that *this* transaction is committed. An error that the handler caused (it went on after a
	// failed statement, it ended the transaction, it left a deferred constraint violated) matches
	// [ErrTransactionBroken] and wraps the driver's error.
	Commit(ctx context.Context) error

	// Rollback undoes the claim and all that the handler wrote, also when the context given to Claim has
	// ended, and leaves the connection fit for use or closes it. After Commit it does nothing. If the transaction was
	// ended by the handler, so that there is nothing to undo any more, it returns an error that matches
	// [ErrTransactionBroken] and says whether the claim is committed.
	Rollback() error
}

// StoreParams are what is stored with a record. Fields may be added.
type StoreParams struct {
	// Topic is the one to which the messages are to be published. Valid UTF-8 without NUL.
	Topic string

	// Produced are the encoded messages, at least one byte.
	Produced []byte
}

// Record is what the inbox keeps of a message that has been processed. A key that is claimed again after its record
// was deleted has another record, with another ProcessedAt.
type Record struct {
	Key Key

	// ProcessedAt is the time of the claim, by the database's clock.
	ProcessedAt time.Time

	// Topic and Produced are the encoded messages that the handler returned, and the topic to which they go. Produced
	// is nil when it returned none, or when they are known to be sent.
	Topic    string
	Produced []byte
}

// Compare is the order of records: by their keys, and then by their ProcessedAt.
func (r Record) Compare(other Record) int {
	return cmp.Or(r.Key.Compare(other.Key), r.ProcessedAt.Compare(other.ProcessedAt))
}
