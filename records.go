package inbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Records is what a repository offers in addition to the path of the messages: for the [Cleaner], and for operators
// (also [Forget] and [ListUnsent]). Every repository of this module implements it; one that does not is still a
// [Repository].
//
// All its methods may be called by many goroutines and many processes at once, and none makes claims wait.
type Records interface {
	// Consumers returns the consumers that have records, sorted byte by byte, and the database's time.
	// It does not look at every record.
	Consumers(ctx context.Context) (consumers []string, now time.Time, err error)

	// DeleteProcessed deletes expired records of one consumer, oldest first, in a short transaction of its own. It
	// returns how many, and when the last of them was processed, from where the next call may continue. Their unsent
	// messages are kept, and records that are locked passed over. When it takes longer than the timeout, or than the
	// server allows, it deletes nothing and its error matches [ErrBatchTimeout]. When the database leaves expired records that
	// nobody has locked, as row level security can, it returns an error as well as how many it has deleted.
	//
	// One call at a time works on a table, whoever makes it; another returns [ErrCleaning] at once. The lock
	// is the transaction's, so it ends with a process that dies.
	DeleteProcessed(ctx context.Context, params DeleteProcessedParams) (deleted int, last time.Time, err error)

	// CountRecords returns how many records are selected.
	CountRecords(ctx context.Context, selection Selection) (count int, err error)

	// FindRecords returns at most limit selected records, in the order of their keys and then of their ProcessedAt,
	// from the one after the given record (the zero record: from the beginning). Pass the last one of a full page to
	// get the next.
	FindRecords(ctx context.Context, selection Selection, after Record, limit int) ([]Record, error)

	// LeaseUnsent returns at most limit selected records as FindRecords does, and keeps other calls from leasing them
	// for a while. Selection.Unsent is set. Those that are leased or locked are passed over. It is one short
	// transaction; a lease ends by itself or when the record is marked as sent.
	LeaseUnsent(ctx context.Context, selection Selection, after Record, limit int, lease time.Duration) ([]Record, error)

	// DeleteRecords deletes records that were found, and their unsent messages, in a short transaction of its own, and
	// returns how many there were. One whose key was claimed again since then, at another time, is kept.
	DeleteRecords(ctx context.Context, found []Record) (deleted int, err error)

	// DeleteUnsent deletes the unsent messages of records that were found, in a short transaction of its own, and
	// returns of how many.
	DeleteUnsent(ctx context.Context, found []Record) (deleted int, err error)

	// Statistics counts the records of the consumers. It reads all of the table, so it is for an operator, or once
	// an hour, not for every scrape of a monitoring system.
	Statistics(ctx context.Context, consumers Consumers) (Statistics, error)
}

// Adviser is an optional ability of [Records].
type Adviser interface {
	// Advice returns what makes the cleaner slow, a sentence each. Nothing of it is a danger.
	Advice(ctx context.Context) ([]string, error)
}

// ErrCleaning is returned by [Records].DeleteProcessed while another call is at work on the table.
var ErrCleaning = errors.New("inbox: another cleaner is at work")

// ErrBatchTimeout is matched by the error of a [Records].DeleteProcessed that took too long. A smaller batch may be
// done in time.
var ErrBatchTimeout = errors.New("inbox: the batch took too long")

// DeleteProcessedParams are what is deleted. Fields may be added.
type DeleteProcessedParams struct {
	// Consumer is that of the records.
	Consumer string

	// From and Before bound the time at which they were processed: not before From, and before Before.
	From, Before time.Time

	// Limit is how many records are deleted at most.
	Limit int

	// Timeout bounds the transaction. It begins when there is a connection: the wait for that is bounded by the
	// context alone. Zero: no bound.
	Timeout time.Duration
}

// Selection chooses records. All fields that are set must match; the zero value chooses all records.
type Selection struct {
	// Consumer and MessageID are those of the key. A message id alone finds the record of every consumer, but
	// reads all of the table.
	Consumer  string
	MessageID string

	// From and To bound the time at which the message was claimed, by the database's clock: not before From, and
	// before To. Zero: no bound. With Unsent it is the time at which its messages were stored.
	From, To time.Time

	// OlderThan chooses what was claimed, or with Unsent stored, longer ago than this by the database's clock. Zero: any age.
	OlderThan time.Duration

	// NotOlderThan chooses the others. Zero: any age.
	NotOlderThan time.Duration

	// Unsent chooses stored messages that are not known to be sent. The record itself may be deleted.
	Unsent bool
}

// NotConfirmedError is returned by [Forget] when the number of records is not the confirmed one. Nothing was
// deleted.
type NotConfirmedError struct {
	Selected, Confirmed int
}

// Error has both numbers.
func (e *NotConfirmedError) Error() string {
	return fmt.Sprintf("inbox: %d records are selected and %d were confirmed, nothing is forgotten", e.Selected, e.Confirmed)
}

// forgetBatch is how many records one statement deletes. Old versions of SQLite take 999 arguments.
const forgetBatch = 300

// Forget deletes the selected records, so that their messages run again when they are delivered again; what
// their handlers wrote stays. Unsent messages stored with them are lost.
//
// The selection must name a consumer. Call it with confirmed 0 first: it counts and, unless there is nothing to
// forget, returns a [*NotConfirmedError] with the number. Call it again with that number to delete; if the number has changed
// meanwhile, it returns the error again. It deletes in short transactions, returns how many records it has
// deleted, also with an error, and deletes no more than was confirmed. Records that the database keeps all the same are
// an error.
func Forget(ctx context.Context, records Records, selection Selection, confirmed int) (deleted int, err error) {
	if selection.Consumer == "" {
		return 0, errors.New("inbox: the selection to forget names no consumer")
	}
	selected, err := records.CountRecords(ctx, selection)
	if err != nil {
		return 0, err
	}
	if selected != confirmed {
		return 0, &NotConfirmedError{Selected: selected, Confirmed: confirmed}
	}
	for after := (Record{}); deleted < confirmed; {
		found, err := records.FindRecords(ctx, selection, after, min(forgetBatch, confirmed-deleted))
		if err != nil || len(found) == 0 {
			return deleted, err
		}
		n, err := deleteFound(ctx, records, selection, after, found, records.DeleteRecords)
		deleted += n
		if err != nil {
			return deleted, err
		}
		after = found[len(found)-1]
	}
	return deleted, nil
}

// deleteFound deletes records that were found after the given one, and once more those that are found again: a relay may
// have leased them meanwhile. Others that were deleted or claimed again by somebody else are no error.
func deleteFound(ctx context.Context, records Records, selection Selection, after Record, found []Record,
	deletion func(context.Context, []Record) (int, error)) (deleted int, err error) {
	left := found
	for range 2 {
		n, err := deletion(ctx, left)
		deleted += n
		if err != nil || n == len(left) {
			return deleted, err
		}
		again, err := records.FindRecords(ctx, selection, after, len(found))
		if err != nil {
			return deleted, err
		}
		left = slices.DeleteFunc(again, func(record Record) bool {
			return !slices.ContainsFunc(found, func(f Record) bool { return f.Compare(record) == 0 })
		})
		if len(left) == 0 {
			return deleted, nil
		}
	}
	return deleted, fmt.Errorf("inbox: %d records of consumer %q were deleted and are still there: row level security, a trigger or a rule keeps them",
		len(left), selection.Consumer)
}

// Statistics are counts of an inbox's records.
type Statistics struct {
	// Consumers, in the order of their names.
	Consumers []ConsumerStatistics

	// Bytes is the size of the table with its indexes on disk; 0 when the database does not tell.
	Bytes int64
}

// ConsumerStatistics are those of one consumer.
type ConsumerStatistics struct {
	Consumer string

	// Records is their number, and Unsent how many of them have messages that are not known to be sent.
	Records, Unsent int64

	// Oldest and Newest are the times at which the first and the last of them were claimed.
	Oldest, Newest time.Time

	// LastDay is how many were claimed in the last 24 hours.
	LastDay int64
}
