// Package model is the flow of one message through the inbox as a small state machine. Its tests explore
// every order of the steps, with crashes, lost answers and redeliveries at every place, and show for each
// thing that the design does what happens without it. It is no part of the library: it models the design,
// the tests with real servers are about the code.
//
// One message, which the broker delivers at least once unless it drops it, two processes of one consumer, a
// relay, and a database. The handler writes one effect and returns one message, under a new UUID each time that
// it runs.
package model

// Design is what one may get wrong. The zero value is the library's.
type Design struct {
	ClaimFirst       bool // the claim is committed in a transaction of its own, before the effect
	ClaimLast        bool // the claim is committed in a transaction of its own, after the effect
	CheckThenInsert  bool // the claim is looked up and then inserted, without a unique key
	AckWaitingCopy   bool // a copy that meets an open claim is acknowledged as a duplicate instead of waiting
	NoRowIsDuplicate bool // a claim that inserts no row is taken for a duplicate, without a look at the record
	EndedIsRetried   bool // a handler that has ended its transaction and fails is tried again
	ClaimIsForgotten bool // a commit keeps the effect and not the claim
	AckBeforeCommit  bool // the message is acknowledged before the commit

	NothingStored           bool // the produced message is not stored
	MarkAtCommit            bool // the produced message is marked as sent when it is stored, before it is published
	MarkAtAck               bool // the produced message is marked as sent when the message is acknowledged
	NewUUIDOnReplay         bool // the stored message gets a new UUID each time it is published
	NoRelay                 bool // only a copy of the message publishes what is stored
	RelayMarksBeforePublish bool // the relay marks the produced message as sent, and then publishes it
	LeaseForEver            bool // a lease does not expire
}

// State is all that the flow depends on. It is comparable, so that a set can hold it.
type State struct {
	Queue     uint8      // copies of the message that are ready to be delivered
	Processes [3]Process // two consumers and the relay

	// The database: what is committed, and a transaction that the server has not rolled back yet.
	Claim    bool
	Effects  uint8
	Stored   uint8 // the UUID of the produced message, until it is marked as sent; 0 is none
	Leased   bool  // the stored message is the relay's for a while
	Orphaned bool  // an open transaction holds the claim, and its process is gone

	// What has happened.
	Runs       uint8 // the UUIDs that the handler has given
	Published  uint8 // the first UUID that was published; 0 is none
	OtherUUID  bool  // the produced message was published under another UUID as well
	AckedEarly bool  // a delivery was acknowledged before there was a committed effect
	Dropped    bool  // the broker has dropped a copy of the message
	Refused    bool  // the message is poisoned, for somebody to look at

	Accidents
}

// Accidents are how often things may still go wrong.
type Accidents struct {
	Crashes  uint8 // of processes
	Copies   uint8 // more of the message, of the broker's or a producer's making
	Failures uint8 // of a handler, a connection, a publish, a claim's insert
	Drops    uint8 // of an unacknowledged message, as by a quorum queue's delivery limit
	Skips    uint8 // acknowledgements without a publish
}

// Process is a consumer with at most one delivery in hand, or the relay with at most one stored message.
type Process struct {
	At          Stage
	Unacked     bool // the broker waits for its ack
	Transaction Transaction
	UUID        uint8 // of the produced message it has in hand; 0 is none
	Mark        bool  // it will mark the stored message as sent
}

// relay is the index of the relay, the last of the processes.
const relay = 2

// names of the processes, by their index.
var names = [...]string{"A", "B", "the relay"}

// Transaction is what is undone unless it is committed.
type Transaction struct {
	Claim, Effect bool
	Stored        uint8
}

// Stage is how far a process is with its delivery.
type Stage uint8

// The stages, in the order of the flow. The relay begins with Committed.
const (
	Idle      Stage = iota
	Received        // next: claim
	Claimed         // next: the handler
	Handled         // next: store what it returned
	Stored          // next: commit
	Unclaimed       // of ClaimLast only
	Committed       // next: publish
	Published       // next: ack
)

// Start is one message in the queue.
func Start(accidents Accidents) State { return State{Queue: 1, Accidents: accidents} }

// Next is what a process did, or what happened to it, and where that has led.
type Next struct {
	Text  string
	State State
}

// step is something that may happen. Take returns what it leads to, nothing when it is not its turn; more than
// one when it may also fail.
type step struct {
	name     string
	accident bool // it need not happen: what waits for it waits in vain
	outside  bool // no process's
	take     func(d Design, s State, process int) []Next
}

// steps are all of them. The first eight are the consumers' flow, in its order.
var steps = []step{
	{name: "deliver", take: deliver}, {name: "claim", take: claim}, {name: "handle", take: handle}, {name: "store", take: store},
	{name: "commit", take: commit}, {name: "publish", take: publish}, {name: "ack", take: ack}, {name: "mark", take: mark},
	{name: "lease", take: lease},
	{name: "expire", outside: true, take: expire}, {name: "rollBackOrphan", outside: true, take: rollBackOrphan},
	{name: "crash", accident: true, take: crash}, {name: "disconnect", accident: true, take: disconnect},
	{name: "drop", accident: true, take: drop}, {name: "skip", accident: true, take: skip},
	{name: "duplicate", accident: true, outside: true, take: duplicate},
}

func deliver(_ Design, s State, p int) []Next {
	if s.Queue == 0 || p == relay || s.Processes[p].At != Idle {
		return nil
	}
	s.Queue--
	s.Processes[p].At, s.Processes[p].Unacked = Received, true
	return []Next{{"receives the message", s}}
}

// claim inserts the key under its unique key. A copy of a processed message inserts no row, rolls back and
// finds the record; one that meets an open claim waits, which here is having no step but to give up.
func claim(d Design, s State, p int) []Next {
	process := &s.Processes[p]
	switch {
	case process.At != Received:
		return nil
	case s.Claim && s.Stored == 0:
		process.At = Published // all was
		return []Next{{"finds the record, and nothing to send", s}}
	case s.Claim:
		process.At, process.UUID = Committed, s.Stored
		if d.NewUUIDOnReplay {
			s.Runs++
			process.UUID = s.Runs
		}
		return []Next{{"finds the record, and the stored message to send", s}}
	case s.held(d) && d.AckWaitingCopy:
		process.At = Published
		return []Next{{"finds the key claimed by an open transaction, and takes the message for processed", s}}
	case s.held(d):
		return []Next{{"waits for the open claim longer than the claim timeout, and nacks", s.nack(p)}}
	}
	process.At = Claimed
	switch {
	case d.ClaimFirst:
		s.Claim = true
		return []Next{{"claims the key and commits the claim", s}}
	case d.ClaimLast:
		return []Next{{"finds no record", s}}
	}
	process.Transaction.Claim = true
	next := []Next{{"claims the key in a transaction", s}}
	if swallowed, ok := s.fail(); ok && d.NoRowIsDuplicate {
		swallowed.Processes[p].At, swallowed.Processes[p].Transaction = Published, Transaction{}
		next = append(next, Next{"claims the key, but a trigger swallows the row; takes the message for processed", swallowed})
	} else if ok {
		next = append(next, Next{"claims the key, but a trigger swallows the row, and there is no record; nacks", swallowed.nack(p)})
	}
	return next
}

// held reports whether an open transaction holds the key. Without a unique key none is ever waited for.
func (s State) held(d Design) bool {
	return !d.CheckThenInsert && (s.Orphaned || s.Processes[0].Transaction.Claim || s.Processes[1].Transaction.Claim)
}

// handle may fail, also after the handler has committed the transaction itself. Then no retry can cure it, and the
// poison queue takes it; in one step, since nothing helps if the process dies in between.
func handle(d Design, s State, p int) []Next {
	if s.Processes[p].At != Claimed {
		return nil
	}
	handled := s
	handled.Runs++
	handled.Processes[p].At, handled.Processes[p].UUID = Handled, handled.Runs
	handled.Processes[p].Transaction.Effect = true
	next := []Next{{"runs the handler, which writes the effect and returns a message", handled}}
	if failed, ok := s.fail(); ok {
		next = append(next, Next{"runs the handler, which fails; rolls back and nacks", failed.nack(p)})
		ended := failed.commit(d, p)
		if d.EndedIsRetried {
			return append(next, Next{"runs the handler, which commits the transaction itself and fails; nacks", ended.nack(p)})
		}
		ended.Refused, ended.Processes[p] = true, Process{Mark: ended.Processes[p].Mark}
		next = append(next, Next{"runs the handler, which commits the transaction itself and fails; poisons the message and acknowledges", ended})
	}
	return next
}

func store(d Design, s State, p int) []Next {
	process := &s.Processes[p]
	if process.At != Handled {
		return nil
	}
	process.At = Stored
	switch {
	case d.NothingStored:
		return []Next{{"stores nothing", s}}
	case d.MarkAtCommit:
		return []Next{{"stores the produced message as sent", s}}
	}
	process.Transaction.Stored = process.UUID
	return []Next{{"stores the produced message", s}}
}

// commit may succeed without an answer, and it may be lost on its way. Both are an error to the process, and
// in the second the server learns only later that the connection is gone.
func commit(d Design, s State, p int) []Next {
	switch process := &s.Processes[p]; {
	case process.At == Unclaimed:
		s.Claim, process.At = true, Committed
		return []Next{{"claims the key and commits the claim", s}}
	case process.At != Stored || d.AckBeforeCommit && process.Unacked:
		return nil
	}
	committed := s.commit(d, p)
	committed.Processes[p].At = Committed
	if d.ClaimLast {
		committed.Processes[p].At = Unclaimed
	}
	next := []Next{{"commits", committed}}

	if failed, ok := committed.fail(); ok {
		next = append(next, Next{"commits, but the answer is lost; nacks", failed.nack(p)})
	}
	if failed, ok := s.fail(); ok {
		failed.Orphaned = failed.Orphaned || s.Processes[p].Transaction.Claim
		next = append(next, Next{"loses its connection before the commit; nacks", failed.nack(p)})
	}
	return next
}

// commit keeps what is in the process's transaction.
func (s State) commit(d Design, p int) State {
	transaction := s.Processes[p].Transaction
	if transaction.Claim && !d.ClaimIsForgotten {
		s.Claim = true
	}
	if transaction.Stored != 0 {
		s.Stored = transaction.Stored
	}
	s.Effects++
	s.Processes[p].Transaction = Transaction{}
	return s
}

// publish is the consumer's, of what it has in hand, and the relay's. That the publisher returns nil is the proof
// with which the stored message is marked as sent.
func publish(d Design, s State, p int) []Next {
	if s.Processes[p].At != Committed {
		return nil
	}
	published := s
	if uuid := s.Processes[p].UUID; s.Published == 0 {
		published.Published = uuid
	} else if uuid != s.Published {
		published.OtherUUID = true
	}
	end := "; nacks"
	if p == relay {
		end = "; leaves the lease to expire"
	}
	next := make([]Next, 1, 3)
	if failed, ok := published.fail(); ok {
		next = append(next, Next{"publishes the produced message, but the confirm is lost" + end, failed.nack(p)})
	}
	if failed, ok := s.fail(); ok {
		next = append(next, Next{"cannot publish the produced message" + end, failed.nack(p)})
	}
	process := &published.Processes[p]
	process.At, process.UUID, process.Mark = Published, 0, process.Mark || !d.MarkAtAck || p == relay
	if p == relay {
		process.At = Idle
	}
	next[0] = Next{"publishes the produced message", published}
	return next
}

func ack(d Design, s State, p int) []Next {
	process := &s.Processes[p]
	early := d.AckBeforeCommit && process.At == Stored && process.Unacked
	if process.At != Published && !early {
		return nil
	}
	s.AckedEarly = s.AckedEarly || s.Effects == 0
	process.Unacked = false
	if !early {
		*process = Process{Mark: process.Mark || d.MarkAtAck}
	}
	return []Next{{"acknowledges", s}}
}

// mark comes later and in batches; nothing waits for it, and it may never come.
func mark(_ Design, s State, p int) []Next {
	if !s.Processes[p].Mark {
		return nil
	}
	s.Processes[p].Mark = false
	lost := s
	s.Stored, s.Leased = 0, false
	return []Next{{"marks the produced message as sent", s}, {"loses the mark", lost}}
}

// lease gives the relay the stored message for a while, whoever left it there, and whatever has become of the input.
func lease(d Design, s State, p int) []Next {
	if process := s.Processes[p]; p != relay || process.At != Idle || s.Stored == 0 || s.Leased || d.NoRelay {
		return nil
	}
	s.Leased = true
	s.Processes[p].At, s.Processes[p].UUID = Committed, s.Stored
	if d.RelayMarksBeforePublish {
		s.Stored, s.Leased = 0, false
		return []Next{{"leases the stored message and marks it as sent", s}}
	}
	return []Next{{"leases the stored message", s}}
}

// expire may come while the relay is at work, which then publishes once more.
func expire(d Design, s State, _ int) []Next {
	if !s.Leased || d.LeaseForEver {
		return nil
	}
	s.Leased = false
	return []Next{{"the lease expires", s}}
}

// crash ends a process at any place; another takes its name at once. The broker takes its delivery back, the server
// will notice that the connection is gone, and a lease stays.
func crash(_ Design, s State, p int) []Next {
	process := s.Processes[p]
	if s.Crashes == 0 || process.At == Idle && !process.Mark {
		return nil
	}
	s.Crashes--
	s.Orphaned = s.Orphaned || process.Transaction.Claim
	s = s.nack(p)
	s.Processes[p].Mark = false
	return []Next{{"crashes", s}}
}

// disconnect ends the connection to the broker only: the message is delivered again while its process goes on.
func disconnect(_ Design, s State, p int) []Next {
	s, ok := s.fail()
	if !ok || !s.Processes[p].Unacked {
		return nil
	}
	s.Queue++
	s.Processes[p].Unacked = false
	return []Next{{"loses its connection to the broker, which takes the message back, and goes on", s}}
}

// drop is disconnect without another delivery.
func drop(_ Design, s State, p int) []Next {
	if s.Drops == 0 || !s.Processes[p].Unacked {
		return nil
	}
	s.Drops--
	s.Dropped, s.Processes[p].Unacked = true, false
	return []Next{{"loses its connection to the broker, which drops the message, and goes on", s}}
}

// skip is a middleware outside of the inbox that acknowledges by itself, before the router publishes or in place of it,
// as a poison queue does that takes a message after its handler has succeeded.
func skip(d Design, s State, p int) []Next {
	process := &s.Processes[p]
	if s.Skips == 0 || p == relay || process.At != Committed {
		return nil
	}
	s.Skips--
	process.Unacked, process.Mark = false, process.Mark || d.MarkAtAck
	goesOn := s
	*process = Process{Mark: process.Mark}
	return []Next{{"acknowledges, and never publishes", s}, {"acknowledges before it publishes", goesOn}}
}

// duplicate is the broker's or a producer's, at any time.
func duplicate(_ Design, s State, _ int) []Next {
	if s.Copies == 0 {
		return nil
	}
	s.Copies--
	s.Queue++
	return []Next{{"another copy of the message comes into the queue", s}}
}

func rollBackOrphan(_ Design, s State, _ int) []Next {
	if !s.Orphaned {
		return nil
	}
	s.Orphaned = false
	return []Next{{"the server notices a lost connection and rolls its transaction back", s}}
}

// fail uses up a failure, if there is one left.
func (s State) fail() (State, bool) {
	if s.Failures == 0 {
		return s, false
	}
	s.Failures--
	return s, true
}

// nack ends an attempt, with its transaction. The broker has the message again unless it was acknowledged, or
// taken back before.
func (s State) nack(p int) State {
	if s.Processes[p].Unacked {
		s.Queue++
	}
	s.Processes[p] = Process{Mark: s.Processes[p].Mark}
	return s
}
