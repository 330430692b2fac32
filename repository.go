package inbox

import (
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
	//   - The key was processed: Claim returns the open transaction and the record, as read back.
	//     "No row was inserted" alone is not enough to say so.
	//   - Otherwise it returns an error, and has rolled back. In doubt it returns an error.
	//
	// The transaction must not outlive ctx: when ctx ends, before or after Claim has returned, the
	// transaction is rolled back and a waiting Claim returns. Claim must need no second connection while
	// it holds one.
	Claim(ctx context.Context, params ClaimParams) (Transaction, *Record, error)

	// MarkSent notes that the messages stored with these records are known to be sent, and releases what
	// was stored. A record is its Key and its ProcessedAt: one that is gone, that was claimed again since, or
	// that has no stored messages is passed over. It runs in a short transaction of its own; processes may mark
	// the same records at once.
	MarkSent(ctx context.Context, records []Record) error
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
	// Store keeps the encoded produced messages, at least one byte, in the claim's record, in this
	// transaction. It returns when the key was claimed, as the record will tell.
	Store(ctx context.Context, produced []byte) (processedAt time.Time, err error)

	// Commit commits the claim and all that the handler wrote. It returns nil only if the database has
	// said that *this* transaction is committed. An error that the handler caused (it went on after a
	// failed statement, it ended the transaction, it left a deferred constraint violated) matches
	// [ErrTransactionBroken] and wraps the driver's error.
	Commit(ctx context.Context) error

	// Rollback undoes the claim and all that the handler wrote, also when the context given to Claim has
	// ended, and leaves the connection fit for use or closes it. After Commit it does nothing.
	Rollback() error
}

// Record is what the inbox keeps of a message that has been processed. A key that is claimed again after its record
// was deleted has another record, with another ProcessedAt.
type Record struct {
	Key Key

	// ProcessedAt is the time of the claim, by the database's clock.
	ProcessedAt time.Time

	// Produced are the encoded messages that the handler returned; nil when it returned none, or when
	// they are known to be sent.
	Produced []byte
}
