package inboxtest

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// RepositorySubject is a repository of yours with what [TestRepository] needs around it. Many goroutines call its
// functions.
type RepositorySubject struct {
	// Repository is the repository under test. Required.
	Repository inbox.Repository

	// Write writes an effect through the transaction in the handler's context. Required.
	Write func(ctx context.Context, effect string) error

	// Effects returns the committed effects, read from outside of any transaction, in any order. Required.
	Effects func(ctx context.Context) ([]string, error)

	// HasTransaction reports whether a handler would find a transaction in the context. Required.
	HasTransaction func(ctx context.Context) bool

	// Age makes a key's record older. Required.
	Age func(ctx context.Context, key inbox.Key, by time.Duration) error

	// End commits the transaction in the context behind the middleware's back. Required unless no handler
	// can do that.
	End func(ctx context.Context) error

	// Abandon rolls the transaction in the context back behind the middleware's back. Required unless no
	// handler can do that.
	Abandon func(ctx context.Context) error

	// FailStatement runs a statement in the transaction that the database refuses, and returns its error.
	// Required with RepositoryFeatures.FailedStatementBreaksTransaction.
	FailStatement func(ctx context.Context) error
}

// RepositoryFeatures says how a repository differs from others without a fault.
type RepositoryFeatures struct {
	// FailedStatementBreaksTransaction: after a refused statement the transaction cannot be committed.
	FailedStatementBreaksTransaction bool

	// WaitingCopyFails: a copy that waited for another one's commit gets a transient error, and is a
	// duplicate on its retry (REPEATABLE READ, SERIALIZABLE).
	WaitingCopyFails bool

	// WithoutRecords: the repository does not implement inbox.Records. What is about them is skipped.
	WithoutRecords bool

	// OneWriter: a claim waits for every open transaction, not just for its own key's.
	OneWriter bool
}

// TestRepository holds a repository to the contract of [inbox.Repository] and [inbox.Records], and to the outcome table
// of the middleware. Each case is a subtest, and the cases run in parallel. The constructor is called once for each
// case; each subject must have records and effects of its own, and clean up by t.Cleanup.
func TestRepository(t *testing.T, features RepositoryFeatures, constructor func(t *testing.T) RepositorySubject) {
	t.Helper()
	families := map[string][]kitCase{
		"Claim":       claimCases,
		"Concurrency": concurrencyCases,
		"Outcome":     outcomeCases,
		"Produced":    producedCases,
		"Publishing":  publishingCases,
		"Relay":       relayCases,
		"Router":      routerCases,
		"Marking":     markingCases,
		"Faults":      faultCases,
		"Retention":   retentionCases,
		"Records":     recordsCases,
		"Age":         ageCases,
	}
	for family, cases := range families {
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			for _, c := range cases {
				t.Run(c.name, func(t *testing.T) {
					t.Parallel()
					c.run(&kit{T: t, RepositorySubject: constructor(t), features: features})
				})
			}
		})
	}
}

// kitCase is one thing that is tried with a repository.
type kitCase struct {
	name string
	run  func(*kit)
}

// kit is one case's test and subject.
type kit struct {
	*testing.T
	RepositorySubject
	features RepositoryFeatures
}

// patience bounds every wait in the kit. It is long, because it only matters when a test fails.
const patience = 30 * time.Second

func (k *kit) context() context.Context { return testContext(k.T) }

// testContext ends with the test, and with the kit's patience.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// records is the other side of the repository.
func (k *kit) records() inbox.Records {
	k.Helper()
	if k.features.WithoutRecords {
		k.Skip("the repository has no inbox.Records")
	}
	records, ok := k.Repository.(inbox.Records)
	if !ok {
		k.Fatalf("%T does not implement inbox.Records; set RepositoryFeatures.WithoutRecords if that is meant", k.Repository)
	}
	return records
}

// wantEffects fails the test unless exactly these effects are committed, in any order.
func (k *kit) wantEffects(want ...string) {
	k.Helper()
	got, err := k.Effects(k.context())
	if err != nil {
		k.Fatalf("cannot read the effects: %v", err)
	}
	count := map[string]int{}
	for _, effect := range want {
		count[effect]++
	}
	for _, effect := range got {
		count[effect]--
	}
	for _, n := range count {
		if n != 0 {
			k.Fatalf("committed effects are %q, want %q", got, want)
		}
	}
}

// process claims the key, writes the effect and commits, as the middleware does.
func (k *kit) process(key inbox.Key, effect string) {
	k.Helper()
	transaction := k.claim(k.context(), key)
	if err := k.Write(inbox.ContextWithTransaction(k.context(), transaction), effect); err != nil {
		k.Fatalf("cannot write the effect: %v", err)
	}
	if err := transaction.Commit(k.context()); err != nil {
		k.Fatalf("cannot commit: %v", err)
	}
}

// processUnsent claims the key and stores messages that nobody sends.
func (k *kit) processUnsent(key inbox.Key) {
	k.Helper()
	transaction := k.claim(k.context(), key)
	if _, err := transaction.Store(k.context(), inbox.StoreParams{Topic: "events", Produced: []byte("unsent")}); err != nil {
		k.Fatal(err)
	}
	if err := transaction.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
}

// claim fails the test unless the key is free.
func (k *kit) claim(ctx context.Context, key inbox.Key) inbox.Transaction {
	k.Helper()
	transaction, record, err := k.Repository.Claim(ctx, inbox.ClaimParams{Key: key})
	if err != nil {
		k.Fatalf("claim of %s: %v", key, err)
	}
	if record != nil {
		k.Fatalf("claim of %s: it was processed at %s, want it free", key, record.ProcessedAt)
	}
	k.Cleanup(func() { _ = transaction.Rollback() })
	return transaction
}

// markSent fails the test unless all records can be marked.
func (k *kit) markSent(records ...inbox.Record) {
	k.Helper()
	if locked, err := k.Repository.MarkSent(k.context(), records); err != nil || len(locked) != 0 {
		k.Fatalf("marking %v: %v are locked, %v", records, locked, err)
	}
}

// wantProcessed fails the test unless the key has a record, which it returns.
func (k *kit) wantProcessed(key inbox.Key) *inbox.Record {
	k.Helper()
	transaction, record, err := k.Repository.Claim(k.context(), inbox.ClaimParams{Key: key})
	if err != nil {
		k.Fatalf("claim of %s: %v", key, err)
	}
	if record == nil {
		_ = transaction.Rollback()
		k.Fatalf("claim of %s: it is free, want it processed", key)
	}
	if transaction != nil {
		k.Fatalf("claim of %s: it was processed, and a transaction is open", key)
	}
	return record
}

var lastKey atomic.Int64

// key returns a key that no other case uses.
func (k *kit) key() inbox.Key {
	return inbox.Key{Consumer: "kit", MessageID: fmt.Sprintf("message-%d", lastKey.Add(1))}
}

// maxKeyBytes is the longest part of a key.
const maxKeyBytes = 255

// deliver starts a router for the handler; it ends with the test. With a publisher, what the handler
// returns is published.
func (k *kit) deliver(repository inbox.Repository, options inbox.Options, withPublisher bool, handler message.HandlerFunc) *deliveries {
	k.Helper()
	m := k.newMiddlewareWith(repository, options)
	d := k.newDeliveries(m)
	d.startRouter(withPublisher, handler, m.Middleware)
	return d
}

func (k *kit) newDeliveries(m *inbox.Middleware) *deliveries {
	d := newDeliveries(k.T, m)
	d.inside = k.HasTransaction
	return d
}

func (k *kit) newMiddleware(repository inbox.Repository) *inbox.Middleware {
	k.Helper()
	return k.newMiddlewareWith(repository, inbox.Options{})
}

// newMiddlewareWith makes a middleware that tries a publish once, unless the options say more.
func (k *kit) newMiddlewareWith(repository inbox.Repository, options inbox.Options) *inbox.Middleware {
	k.Helper()
	if options.PublishBackOff == 0 {
		options.PublishBackOff = time.Nanosecond
	}
	m, err := inbox.NewMiddleware(repository, options)
	if err != nil {
		k.Fatal(err)
	}
	return m
}

// effect is a handler that writes the message id as its effect.
func (k *kit) effect(runs *atomic.Int32) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		runs.Add(1)
		return nil, k.Write(msg.Context(), msg.UUID)
	}
}

// produce is a handler that returns one message and writes no effect.
func (k *kit) produce(runs *atomic.Int32) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		runs.Add(1)
		return []*message.Message{message.NewMessage("event-of-"+msg.UUID, nil)}, nil
	}
}

func (k *kit) wantRuns(runs *atomic.Int32, want int32) {
	k.Helper()
	if got := runs.Load(); got != want {
		k.Fatalf("the handler ran %d times, want %d", got, want)
	}
}

func (k *kit) wantNotPoisoned(err error) {
	k.Helper()
	if inbox.ShouldPoison(err) {
		k.Fatalf("the error would be poisoned: %v", err)
	}
}

// cleaner makes batches of two, so that a handful of records takes several.
func (k *kit) cleaner(options inbox.CleanerOptions) *inbox.Cleaner {
	k.Helper()
	options.BatchSize, options.BatchPause = 2, time.Millisecond
	if options.Consumers.Validate() != nil {
		options.Consumers = inbox.AllConsumers()
	}
	cleaner, err := inbox.NewCleaner(k.records(), options)
	if err != nil {
		k.Fatal(err)
	}
	return cleaner
}

func (k *kit) wantPass(retention time.Duration, want inbox.CleanerPass) {
	k.Helper()
	k.wantPassWith(inbox.CleanerOptions{Retention: inbox.Retention{Default: retention}}, want)
}

func (k *kit) wantPassWith(options inbox.CleanerOptions, want inbox.CleanerPass) {
	k.Helper()
	got, err := k.cleaner(options).Pass(k.context())
	if err != nil || got != want {
		k.Fatalf("pass %+v, %v, want %+v", got, err, want)
	}
}
