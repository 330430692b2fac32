// Package inbox makes the effect of a message happen once, however often a broker delivers it.
//
// Delivery is at-least-once; the effect is once. The middleware opens a SQL transaction, claims the message
// (consumer and message id) in an inbox table, gives the transaction to the handler in the message's
// context, and commits or rolls back both together. A later copy finds the claim and is acknowledged
// without running the handler. The database decides, by a unique key; nothing is looked up first.
//
// # What is promised
//
// The claim of a message and everything that the handler writes through the transaction it is given commit
// together or not at all.
//
// Messages that the handler returns are stored in that same transaction, because Watermill's router
// publishes them after it. They are published at least once, always with the same UUID, as long as the
// broker redelivers the unacknowledged input and the publisher's nil means "stored"; with a [Relay], also if
// the input never comes again. The publisher's nil is the proof that they are sent, see
// [Middleware.DecoratePublisher]; call [Middleware.Close] at the end for the last marks.
//
// # What is not
//
//   - E-mails, HTTP calls and publishes that the handler makes itself are at-least-once. [KeyFromContext] is
//     a stable idempotency key for the other side.
//   - A writer that goes around the transaction, the pool instead of the transaction, is outside.
//   - A message that comes back after its record was deleted runs again, unless the guard for messages that are
//     too old is on, see [TooOldOptions]. Nothing deletes records unless a [Cleaner] runs; the [Retention] is
//     yours to choose.
//   - Durability is the database's: synchronous_commit=off, a lagging standby that is promoted, or SQLite
//     with synchronous=OFF can lose an acknowledged effect, together with its claim.
//   - A handler that ends its goroutine (runtime.Goexit, which t.FailNow calls) is rolled back, but the router
//     then neither acks nor nacks the message, and the subscription waits for it until it is closed.
//
// # The flow
//
//	message > key: consumer, message id      invalid: permanent error, no SQL is sent
//	        > open transaction and claim     processed before: ack, or its stored messages again
//	        > handler                        error, panic, Goexit: roll back
//	        > store what it returned, commit
//	        > the router publishes, which proves it, and acks
//
// # In a router
//
//	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
//	// ...
//	once, err := inbox.NewMiddleware(repository, inbox.Options{Logger: logger})
//	// ...
//	err = once.AddTo(router, inbox.RouterOptions{PoisonPublisher: publisher, PoisonTopic: "poison", Timeout: time.Minute})
//
// and in the handler:
//
//	tx, _ := inboxsql.TxFromContext(msg.Context())
//	_, err := tx.ExecContext(msg.Context(), `UPDATE accounts SET balance = balance - $1 WHERE id = $2`, ...)
//
// # The order of middlewares
//
// [Middleware.AddTo] adds them all. By hand it is Delivery, PoisonQueue, Retry, RestoreContext, Timeout, Recoverer, inbox, from
// the outside to the inside, and DecoratePublisher as the router's first publisher decorator.
//
//   - Delivery is outermost, so that all attempts of one delivery have one key.
//   - Retry is outside of the inbox, so that every attempt has a fresh transaction. Inside, what a failed
//     attempt wrote is committed with the next one's, or PostgreSQL refuses every further statement.
//   - PoisonQueue is outside of the inbox. Inside, it turns the error into success: half of the work and the
//     claim are committed, and the poisoned copy is a duplicate when it is played back.
//   - RestoreContext is between Retry and Timeout, because Timeout leaves a dead context on the message, with which
//     many poison publishers do not publish.
//   - Recoverer is inside of Retry, so that a handler that always panics is poisoned after the retries.
//     Outermost, the panic jumps over both and is redelivered without end.
//
// # Whose error it is
//
// What [ShouldRetry] and [ShouldPoison] say. What is not poisoned is nacked after the retries, and the broker delivers it
// again.
//
//	error                                             retried  poisoned  because
//	handler's own, a panic, a unique violation, ...   yes      yes       the message or the handler causes it
//	Permanent                                         no       yes       the handler knows
//	handler's time limit of its own, 57014            yes      yes       a bad message may meet it each time
//	message's context cancelled or past its deadline  yes      no        a shutdown, or the Timeout of an attempt
//	lost connection, network, DNS is away             yes      no        an outage
//	unknown host, a port that is none                 yes      yes       an address out of a message
//	PostgreSQL 08, 40, 530-533, 57P, 58000, 58030,    yes      no        the server's state
//	    25P03, 25P04, 55P03
//	SQLite busy, locked, I/O error, full              yes      no        the database's state
//	other codes of both                               yes      yes       the statement, or its values
//	ErrInvalidKey, ErrTooOld, ErrNoPublishTopic       no       yes       the message, or the router's set-up
//	ErrInFlight, ErrNoRecord, ErrStoredMessages       yes      no        another copy runs, or an operator is needed
//	outbox: SQLSTATE 22 and 23, SQLite constraint     yes      yes       what the handler has returned is refused
//	claim, outbox, store and commit otherwise         yes      no        never the message's fault
//	ErrTransactionBroken                              yes      yes       the handler made the commit impossible
//	    because the handler has ended it              no       yes       a retry would be a duplicate of a half
//
// SQLSTATEs are those of lib/pq and pgx, SQLite's codes those of modernc.org/sqlite and github.com/mattn/go-sqlite3. A
// number in another error is not taken for a code. The connection that a rollback finds lost counts as the reason for what
// the handler returned, unless that is a time limit.
package inbox
